"""How an op runs on a device of its own: compiled, or computed again in part."""
