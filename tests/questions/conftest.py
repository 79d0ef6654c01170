"""What the tests of questions have in common: they plan small cases."""

from helpers.short_searches import short_searches, whole_searches

__all__ = ["short_searches", "whole_searches"]
