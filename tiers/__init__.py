"""Places for checkpoints: memory and disk, their files, commit and drainer. No torch."""
