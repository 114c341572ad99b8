"""Which prompt tokens the model sees at all: filters that rewrite the prompt before it is cached."""
