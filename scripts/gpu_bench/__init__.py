"""What `make gpu-check` measures, and what it makes of it."""
