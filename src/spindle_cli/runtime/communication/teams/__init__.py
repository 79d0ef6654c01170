"""Parameters that several teams of ranks share out, each for itself."""
