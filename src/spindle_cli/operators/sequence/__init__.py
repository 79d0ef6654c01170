"""The stream between the split parts of a layer, shared out along the sequence over a tensor-parallel group."""
