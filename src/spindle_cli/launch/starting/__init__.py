"""Start the workers of a launch."""
