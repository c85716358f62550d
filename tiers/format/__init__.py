"""Checkpoints as files: names, digests, shards, the manifest."""
