"""What a run took, and what of it goes into the times that a profile has of ops."""
