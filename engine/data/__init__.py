"""Data: a stateless order over samples, built-in text, and people's own data sets."""
