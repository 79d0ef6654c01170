"""Pipelines whose lanes run micro-batches: chosen among all plans of an iteration."""
