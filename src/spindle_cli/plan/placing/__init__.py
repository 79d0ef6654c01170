"""Which devices each slice gets."""
