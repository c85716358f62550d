"""The state of a step copied into memory, slice by slice, while the next step computes."""
