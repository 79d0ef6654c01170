"""What is compiled is kept for the next run, and users are told what they wait for where nothing is kept."""

from __future__ import annotations

from pathlib import Path

import numba
import pytest
from numba.core import caching

from helpers.logged import messages_logged
from spindle_cli.plan.compiled import compiled_and_kept


def add_one(number: int) -> int:
    return number + 1


def test_users_are_told_of_what_takes_long_until_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(add_one, "__qualname__", "add_one")
    with messages_logged() as messages:
        assert compiled_and_kept(add_one, [], "compiling, a minute")(1) == 2
    assert messages == ["compiling, a minute"]
    monkeypatch.setattr(add_one, "__qualname__", "add_one")
    with messages_logged() as messages:
        assert compiled_and_kept(add_one, [], "compiling, a minute")(2) == 3
    assert messages == []


def test_where_nothing_can_be_kept_it_is_compiled_in_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where neither the package's folder nor the user's can be written."""
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])
    monkeypatch.setattr(add_one, "__qualname__", "add_one")
    with messages_logged() as messages:
        assert compiled_and_kept(add_one, [], "compiling")(1) == 2
    assert messages == ["compiling"]


def test_what_is_short_is_compiled_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(add_one, "__qualname__", "add_one")
    with messages_logged() as messages:
        assert compiled_and_kept(add_one, [])(1) == 2
    assert messages == []
