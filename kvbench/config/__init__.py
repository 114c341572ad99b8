"""Configuration files by name, and the parts that are built from them."""
