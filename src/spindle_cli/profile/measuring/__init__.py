"""Measure many ops in worker processes."""
