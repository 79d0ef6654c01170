"""What a user calls things by: patterns of names, files by their names, modules of a task."""
