"""Small random models in the style that people write, and whether they are trained as in plain PyTorch."""
