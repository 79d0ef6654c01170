"""Check by numbers that what a profile lets a plan split may be split."""
