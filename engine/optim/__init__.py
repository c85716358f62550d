"""Optimizers whose state exists from the first step."""
