"""`digits`: handwritten digits, their names in sixteen languages, and speech of the names."""
