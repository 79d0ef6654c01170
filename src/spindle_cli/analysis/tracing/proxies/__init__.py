"""What a forward sees while it is traced."""
