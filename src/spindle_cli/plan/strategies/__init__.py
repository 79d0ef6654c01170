"""The strategies that make a schedule: one file each."""
