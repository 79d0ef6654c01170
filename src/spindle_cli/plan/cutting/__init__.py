"""A batch cut over devices of several types: allocations."""
