"""Initial values from files (`init_from`): what they are called there, and what of them goes where."""
