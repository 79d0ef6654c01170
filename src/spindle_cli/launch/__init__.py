"""Start a plan's workers, watch them, and say how the run went."""
