"""The state brought back: all ranks load the same version, whoever has its shards, or none does."""
