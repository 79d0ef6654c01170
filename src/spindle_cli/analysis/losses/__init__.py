"""What a loss is a sum or a mean of, and what each share of its batch adds to it."""
