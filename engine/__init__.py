"""Everything that needs torch: launch, worker loop, models, data, snapshots, restore."""
