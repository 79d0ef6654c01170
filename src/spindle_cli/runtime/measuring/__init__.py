"""What a step took, when, and how that compares with the plan."""
