"""What devices do together once in a step: bytes of sums and gathers, and what gradients are made of."""
