"""The machine at hand, and device types."""
