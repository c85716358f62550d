"""Slots on tmpfs that outlive the workers, and the copies of other nodes' slots."""
