"""How one operator runs: whole, compiled, split over a tensor-parallel group, on a share of its batch."""
