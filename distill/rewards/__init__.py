"""What a response earns: rewards of whole responses and of single tokens, accuracy."""
