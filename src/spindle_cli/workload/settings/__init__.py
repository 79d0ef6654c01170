"""What `train:` of a workload file may hold, as types. No torch."""
