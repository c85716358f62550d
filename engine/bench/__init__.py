"""`dtrain bench`: blocks of steps of all methods, in the same workers."""
