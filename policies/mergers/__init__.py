"""What becomes of the evicted."""
