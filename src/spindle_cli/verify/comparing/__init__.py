"""Compare what the two runs have left."""
