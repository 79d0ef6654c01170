"""Which tasks run at which step, and which sets of tasks that makes."""
