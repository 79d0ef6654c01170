"""What torch.distributed talks by: settings of NCCL, and a backend as strict as it for tests."""
