"""Tables, figures and trackers (W&B) for finished runs."""
