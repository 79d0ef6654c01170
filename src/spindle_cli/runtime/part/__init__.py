"""This rank's part of the model."""
