"""Run an op's layer on this device's part of the sequence."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.operators.sequence.types import Argument, SequenceSplit
from spindle_cli.operators.tensor_group import SequencePart, Shared


class SequenceRun:
    """One run of a layer; its methods are hooks of the layer's modules."""

    def __init__(self, split: SequenceSplit, part: SequencePart) -> None:
        self._split = split
        self._part = part
        self._size = 0
        self._gathered: list[tuple[Tensor, Tensor]] = []

    def begin(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the layer: of its trunk, this device's part."""
        given = argument(self._split.trunk, args, kwargs)
        shared = given if isinstance(given, Shared) else self._part.cut(given)
        self._size = shared.length
        return with_argument(self._split.trunk, shared.tensor, args, kwargs)

    def enter(
        self, places: tuple[Argument, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before a split part of the layer: all of what it takes a part of."""
        for place in places:
            whole = self._gather(argument(place, args, kwargs))
            args, kwargs = with_argument(place, whole, args, kwargs)
        return args, kwargs

    def leave(self, summand: Tensor) -> Tensor:
        """Behind a rowwise map: this device's part of the sum.

        Raises:
            WorkloadError: it has not as many positions as the trunk.
        """
        shared = self._part.scatter_sum(summand)
        if shared.length != self._size:
            raise WorkloadError(
                f"{self._split.layer}: behind a split part it has {shared.length} positions, and before it "
                f"{self._size}, so that devices cannot have a part of them each",
                hint="Keep the sequence whole: Workload(..., tp_sequence=False).",
            )
        return shared.tensor

    def end(self, _: nn.Module, __: object, result: Any) -> Any:
        """Behind the layer: a part is handed on as one, or joined, as the op around it takes it."""
        if self._split.results == (None,):
            return self._handed(result, None)
        listed = list(result)
        for place in self._split.results:
            assert place is not None, "a layer gives one tensor or several"
            listed[place] = self._handed(result[place], place)
        return type(result)(listed)

    def _handed(self, part: Tensor, place: int | None) -> Tensor | Shared:
        shared = Shared(part, self._size, self._part)
        return shared if place in self._split.kept else shared.whole()

    def _gather(self, part: Tensor) -> Tensor:
        """Gather a tensor once, whoever takes it."""
        for gathered_part, whole in self._gathered:
            if gathered_part is part:
                return whole
        whole = self._part.gather(Shared(part, self._size, self._part))
        self._gathered.append((part, whole))
        return whole


def argument(place: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Look an argument of a call up by its place or its name."""
    return args[place] if isinstance(place, int) else kwargs[place]


def with_argument(
    place: Argument, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with another value in one place."""
    if isinstance(place, int):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, place: value}
