"""How the tests that search by themselves (hypothesis) search: alike in every run, or anew."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("alike", derandomize=True, database=None)
settings.register_profile("anew", print_blob=True)
settings.load_profile("alike")
