"""Further commands: benchmarks, predicted bytes, diagnostics, calibration, scoring, checks, lm-eval's model."""
