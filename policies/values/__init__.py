"""Does the value count: wrappers that make any scorer value-aware."""
