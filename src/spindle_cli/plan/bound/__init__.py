"""Lower bounds: linear programs over the whole graph."""
