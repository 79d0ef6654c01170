"""A run's trained model as one file for plain PyTorch."""
