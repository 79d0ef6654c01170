"""What the ops of a MetaOp hold: sizes of parameters, and what ops use of one another's."""
