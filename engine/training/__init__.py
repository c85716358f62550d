"""One step after the other: passes, update, evaluation, and what is measured and reported of them."""
