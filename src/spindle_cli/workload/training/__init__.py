"""What the train settings make: optimizer, learning rate, precision, batches."""
