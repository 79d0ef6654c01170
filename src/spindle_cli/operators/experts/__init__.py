"""Layers with a mixture of experts: each device of a group has samples of its own, and experts of its own."""
