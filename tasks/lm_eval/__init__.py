"""Every task of lm-eval, with its own prompts, filters and metrics."""
