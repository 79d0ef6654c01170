"""Constraints on trained parameters: each rank applies them to what its optimizers step."""

from __future__ import annotations

from collections.abc import Sequence

from spindle_cli.files.fragments import parse_key
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.workload.moving import Constrained


class Constraints:
    """Those of a workload, on some owned ranges."""

    def __init__(self, constraints: Sequence[Constrained], owned_ranges: Sequence[OwnedRange]) -> None:
        self._applied: list[tuple[Constrained, OwnedRange]] = []
        for constraint in constraints:
            for owned in owned_ranges:
                if constraint.name in (owned.name, parse_key(owned.name)[0]):
                    assert owned.part is None or constraint.treats_elements_alone, "it is stepped whole"
                    self._applied.append((constraint, owned))

    def apply(self, names: frozenset[str] | None = None) -> None:
        """An update has been made; `names`: of these parameters alone, of all if None."""
        for constraint, owned in self._applied:
            if names is None or owned.name in names:
                constraint.apply(owned.tensor.detach())
