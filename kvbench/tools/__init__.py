"""Commands of their own: scoring, diagnostics, predicted bytes, benchmarks, lm-eval's model."""
