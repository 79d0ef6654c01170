"""What forwards read that nobody else may change while the model is trained, and noticing who does."""
