"""Questions about plans: which strategy, what changed, how many devices, what binds, what if."""
