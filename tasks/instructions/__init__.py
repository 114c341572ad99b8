"""Instructions that a program can verify: IFBench, and system instructions that are compressed before the request."""
