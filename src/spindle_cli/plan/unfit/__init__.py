"""What is tried where the best that is known of fits no devices' memory."""
