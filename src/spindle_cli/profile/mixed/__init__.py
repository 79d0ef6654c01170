"""Profiles of several types of device: what a cluster sees of them, and putting them together."""
