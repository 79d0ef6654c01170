"""What a run writes, read as it comes and thinned to what can be drawn."""
