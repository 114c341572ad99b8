"""Prefill, decoding and scoring of sequences in batches, and the computation of runs."""
