"""What explains a plan: its critical chain, what devices are worth, and why MetaOps got theirs."""
