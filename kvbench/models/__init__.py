"""Models and prompts: finding, checking and loading models, tokenization, prompts."""
