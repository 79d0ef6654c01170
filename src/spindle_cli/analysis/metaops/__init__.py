"""From a traced graph to ops, and from ops to MetaOps."""
