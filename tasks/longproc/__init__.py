"""LongProc: long answers that must follow the prompt step by step."""
