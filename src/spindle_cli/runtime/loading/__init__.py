"""Processes of a node that load batches, and hand each to the ranks that take samples of it."""
