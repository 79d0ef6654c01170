"""Evaluation: forward passes of the same placement, without a trace in what is trained."""
