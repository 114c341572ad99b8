"""One run: its cell, its samples on disk, the numbers that follow from them."""
