"""The update of the plain run."""
