"""How parameters are updated, from the train settings: optimizers, which parameters have which, rates."""
