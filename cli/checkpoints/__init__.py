"""The commands on checkpoints. None needs torch."""
