"""Messages and collectives."""
