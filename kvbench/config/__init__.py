"""From names and command lines to parts: presets, slugs, choices, overrides, help."""
