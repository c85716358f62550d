"""`dtrain bench`."""
