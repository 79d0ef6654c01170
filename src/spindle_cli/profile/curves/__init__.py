"""Fit what was measured."""
