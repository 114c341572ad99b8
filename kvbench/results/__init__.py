"""From samples to numbers: metrics, and how sure they are."""
