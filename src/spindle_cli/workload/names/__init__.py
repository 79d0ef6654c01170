"""What a user calls things by: patterns of names, and files by their names."""
