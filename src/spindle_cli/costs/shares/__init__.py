"""Shares of a batch: how many samples each has, and what an op takes on them."""
