"""Has the ops of a rank hand what gathered gradients are made of to their buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from spindle_cli.operators.factors.capture import Capturing, Taker
from spindle_cli.runtime.step.compute import LocalSlice


def capture(slices: Iterable[LocalSlice], takers: Mapping[int, Taker]) -> None:
    """Whenever an op of these slices runs that uses a gathered matrix, also when it is recomputed.

    Args:
        takers: by the matrix's id.
    """
    seen: set[int] = set()
    for local in slices:
        for runnable in local.runnable:
            own = {id(each): takers[id(each)] for each in runnable.parameters() if id(each) in takers}
            if own and id(runnable) not in seen:
                seen.add(id(runnable))
                _Switch(own).put_on(runnable)


class _Switch:
    """Turns capturing on for as long as a module runs, in whichever thread that is."""

    def __init__(self, takers: Mapping[int, Taker]) -> None:
        self._takers = takers
        self._on: list[Capturing] = []

    def put_on(self, module: nn.Module) -> None:
        """On a module."""
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        mode = Capturing(self._takers)
        mode.__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._on.append(mode)

    def _leave(self, *_: Any) -> None:
        self._on.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]  # as above
