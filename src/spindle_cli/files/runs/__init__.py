"""What a run leaves beside its metrics."""
