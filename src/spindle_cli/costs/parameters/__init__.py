"""What parameters cost beside the ops that use them: sums of gradients, sharing out, updates."""
