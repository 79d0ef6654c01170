"""Losses over a large vocabulary: computed in chunks, or with the vocabulary cut."""
