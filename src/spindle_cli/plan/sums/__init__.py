"""How the gradients of each parameter are summed: as they are, or gathered as what they are made of."""
