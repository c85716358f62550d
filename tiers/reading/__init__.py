"""What can be resumed from, in whatever tier and from whatever layout, verified as it is read."""
