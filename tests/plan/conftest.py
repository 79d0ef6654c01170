"""What the tests of planning have in common."""

from helpers.short_searches import short_searches, whole_searches

__all__ = ["short_searches", "whole_searches"]
