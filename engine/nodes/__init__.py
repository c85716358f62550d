"""The other nodes of a run, as node 0 sees them: who takes part, what they report."""
