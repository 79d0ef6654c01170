"""Losses that compare every sample with every other, cut into shares: which they are, and as what steps."""
