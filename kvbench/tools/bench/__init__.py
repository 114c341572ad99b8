"""Latency, memory and throughput of policies: `python -m kvbench.bench`."""
