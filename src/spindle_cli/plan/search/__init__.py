"""Schedules, and the search over them."""
