"""`digits`: handwritten digits, their names in sixteen languages, and speech of the names."""

from spindle_cli.zoo.digits.build import build

__all__ = ["build"]
