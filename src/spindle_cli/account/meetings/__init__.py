"""Which devices meet over which communicator."""
