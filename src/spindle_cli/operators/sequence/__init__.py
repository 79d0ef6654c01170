"""What flows between the split parts of a layer, shared out along the sequence by a group of devices."""
