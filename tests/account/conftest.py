"""What the tests of the account have in common: they plan small cases."""

from helpers.short_searches import short_searches

__all__ = ["short_searches"]
