"""Fields that are the same in every sample, and what follows from their values."""
