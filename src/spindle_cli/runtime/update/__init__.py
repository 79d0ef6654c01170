"""The optimizer's side of a step."""
