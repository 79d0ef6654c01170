"""What a process of ours does with its machine."""
