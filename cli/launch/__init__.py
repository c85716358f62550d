"""`dtrain launch`: scripts for schedulers and for hosts."""
