"""Estimate ops without running them."""
