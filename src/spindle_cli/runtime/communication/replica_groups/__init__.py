"""Parameters that several replica groups of ranks share out, each for itself."""
