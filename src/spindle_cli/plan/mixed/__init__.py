"""Plans for clusters whose devices are of several types."""
