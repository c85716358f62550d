"""Models: the built-in GPT, and people's own."""
