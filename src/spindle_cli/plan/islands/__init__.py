"""Plans for islands of devices that average now and then alone (`train.local_sgd`)."""
