"""The drainer: snapshots carried from memory to the slower tiers, behind the training's back."""
