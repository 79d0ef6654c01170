"""Prove that a plan trains the same model as one plain process."""
