"""What plans give up where memory is short, and take back where it is not."""
