"""What the runtime itself takes of a processor, measured by training a toy with it."""
