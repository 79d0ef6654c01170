"""Watch the workers of a launch."""
