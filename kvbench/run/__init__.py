"""The configuration of a run, its checks, its id and the digests of its code and data."""
