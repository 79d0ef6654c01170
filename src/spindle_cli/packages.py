"""Packages that can be called: `spindle_cli.plan` is a package, and `spindle_cli.plan(...)` makes a plan."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = getattr(import_module("spindle_cli.api"), self.__name__.rpartition(".")[2])
        return function(*args, **kwargs)


def make_callable(name: str) -> None:
    """Let a package of ours be called as the function of its name in `spindle_cli.api`."""
    sys.modules[name].__class__ = _CallablePackage
