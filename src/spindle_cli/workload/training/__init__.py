"""What the train settings make of batches and numbers."""
