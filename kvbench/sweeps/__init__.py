"""Plans the runs of a command, computes them here or submits them to a cluster, and reports their progress."""
