"""What is tried where the usual search finds nothing that fits, or is slowed down by links to more nodes."""
