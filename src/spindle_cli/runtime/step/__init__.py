"""One iteration of a rank's program."""
