"""The plan while a run goes on: what was observed, and what is decided from it."""
