"""Marks of tests about what not every version of torch can do."""

from __future__ import annotations

import pytest

from spindle_cli.runtime.memory.gather_memory import EXCHANGES_STORAGES

exchanges_storages = pytest.mark.skipif(
    not EXCHANGES_STORAGES, reason="this torch cannot exchange what two storages have: before 2.13"
)
