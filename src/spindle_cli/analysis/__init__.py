"""What a workload's code does, found by running it on tensors without values: which ops it is made of, which
of them are equal runs (MetaOps), and which of them may have their batch split.

Reading order: `analyse.py` (all of it, in order), `tracing/` (from forward to a graph), `metaops/` (from the
graph to ops and MetaOps), `splitting/` and `rules/` (may an op's batch be split?), `losses/` and `pairs/`
(what a loss is a mean of, and losses of pairs of samples).
"""
