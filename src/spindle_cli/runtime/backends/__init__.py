"""What torch.distributed talks by: NCCL, gloo beside it, and for tests a backend as strict."""
