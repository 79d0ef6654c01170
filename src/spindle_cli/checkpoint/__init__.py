"""What a run's checkpoints hold, how they are read, and what another run takes over of one."""
