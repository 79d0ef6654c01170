"""Of many cases of one property those that `make test` tries; `make test-all` tries all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every_other(cases: Iterable[str]) -> list[Any]:
    """Parameters of a test, every second of which is marked as long."""
    return [
        pytest.param(case, marks=pytest.mark.long) if number % 2 else case
        for number, case in enumerate(cases)
    ]
