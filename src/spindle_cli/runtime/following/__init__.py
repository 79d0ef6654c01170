"""Who follows a run: callbacks, and the loggers on top of them."""
