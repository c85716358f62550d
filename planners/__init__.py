"""Pure arithmetic on frozen data: sizes, times, windows, intervals. No torch, no I/O."""
