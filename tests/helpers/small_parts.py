"""Updates of parts as small as a test's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from spindle_cli.account import step_end


@contextmanager
def parts_from(num_bytes: int, most: int = step_end.MOST_PARTS) -> Iterator[None]:
    """Inside, so many bytes are worth an update, and there are at most so many parts."""
    with patch.object(step_end, "PART_BYTES", num_bytes), patch.object(step_end, "MOST_PARTS", most):
        yield
