"""The terminal and the person at it: signals, output, refusals, what stands below the help."""
