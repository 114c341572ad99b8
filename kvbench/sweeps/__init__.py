"""Many cells: planned from one command line, computed here or as jobs of a cluster, and followed while they run."""
