"""Latency, memory and throughput of policies: `kvbench bench`."""
