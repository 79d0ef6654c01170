"""Datasets that are read one sample after the other, and loaders with processes of their own."""
