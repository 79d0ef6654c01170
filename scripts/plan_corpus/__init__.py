"""Sixty planning problems with what their plans were when they were frozen: `make bench-plan`."""
