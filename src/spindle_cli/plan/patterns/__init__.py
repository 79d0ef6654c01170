"""Shorter schedules from the patterns of allocations that fit side by side in the order of a schedule."""
