"""`dtrain plan`."""
