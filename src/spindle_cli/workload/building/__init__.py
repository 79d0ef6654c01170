"""From a user's source to a workload in memory."""
