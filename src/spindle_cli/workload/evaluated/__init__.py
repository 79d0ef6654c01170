"""Tasks as they are evaluated, and the data for it."""
