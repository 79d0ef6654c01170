"""Islands of ranks that train copies of the model, and average now and then alone (`train.local_sgd`)."""
