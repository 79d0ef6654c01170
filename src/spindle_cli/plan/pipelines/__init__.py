"""Candidates that keep every parameter in one lane of devices, components cut between their ops if need
be.
"""
