"""Numbers of a step: those that tasks declare, and what forwards read that nobody else may change."""
