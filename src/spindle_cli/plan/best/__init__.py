"""The best plan of all strategies, orders, fallbacks and micro-batches."""
