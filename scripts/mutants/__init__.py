"""Small bugs put into the code one at a time, and whether the tests notice (`make mutants`)."""
