"""Code that takes the batch apart, works on each sample's part by itself and joins what comes out.

    parts = torch.split(x, lengths.tolist())        # or x.unbind(0), or a loop over x
    y = torch.cat([attend(part) for part in parts])

For another number of samples it has other operations. They act on samples one by one all the same where each
part belongs to one sample, the same is done for every sample, and the results are joined in the samples'
order. What is done to a part has a *formula*: the operations that lead to it, with their numbers and with
tensors that are no sample's. Formulas are compared between the samples and between the sizes of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spindle_cli.analysis.rules.tape import Entry, tensors_in
from spindle_cli.analysis.rules.types import WHOLE, Batch, Mixed, State
from spindle_cli.analysis.rules.views import positive

_DIVIDES = frozenset({"split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unbind"})
_JOINS = frozenset({"cat", "stack"})
_ALONE = Mixed("it takes one sample's part out of the batch")


class UnlikeLoopError(Exception):
    """Samples' parts are worked on in a way that is not known to be the same for each."""


@dataclass(frozen=True)
class _Part:
    """A tensor that belongs to one sample; formulas that are equal give the same function of the sample."""

    sample: int
    formula: Hashable


class Loops:
    """The parts of single samples on some tapes.

    Args:
        sizes: of the batch, one per tape.
        state_of, give: asks and says what a tensor of the first tape is.
        is_held: whether a tensor is a parameter or buffer, which all tapes have.
        is_spoiled: whether something else than samples' own was written into the memory of one.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        tapes: Sequence[Sequence[Entry]],
        state_of: Callable[[Tensor], State],
        give: Callable[[Tensor, State], None],
        is_held: Callable[[Tensor], bool],
        is_spoiled: Callable[[Tensor], bool],
    ) -> None:
        self._sizes = sizes
        self._state_of = state_of
        self._give = give
        self._is_held = is_held
        self._is_spoiled = is_spoiled
        self._parts: list[dict[int, _Part]] = [{} for _ in sizes]
        self._wholes: list[dict[int, Hashable]] = [{} for _ in sizes]  # formulas of what is no sample's
        self._last_use = [_last_uses(tape) for tape in tapes]
        self._until = [-1] * len(sizes)  # the last entry of a tape that uses a part known so far
        self._count = 0

    def made(self, entries: Sequence[Entry]) -> None:
        """Remember what all tapes have made in one step, to know it again in formulas.

        Behind a change in place nothing is known any more: of some parts it may come before what is done to
        them, of others behind.
        """
        if _writes(entries[0]):
            self._parts = [{} for _ in self._sizes]
            self._wholes = [{} for _ in self._sizes]
        self._count += 1
        tensors = [tensors_in(entry.result) for entry in entries]
        for position, alike in enumerate(zip(*tensors, strict=True)):
            if self._state_of(alike[0]) == WHOLE and not self._is_spoiled(alike[0]):
                for wholes, tensor in zip(self._wholes, alike, strict=True):
                    wholes[id(tensor)] = ("made", self._count, position)

    def is_whole(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors, one of each tape, were made in a loop from nothing of any sample's."""
        origins = [wholes.get(id(tensor)) for wholes, tensor in zip(self._wholes, tensors, strict=True)]
        return origins[0] is not None and all(origin == origins[0] for origin in origins)

    def skip(self, tape: int, entries: Sequence[Entry], position: int) -> int:
        """Follow what a tape does to parts of single samples; the position of the next other entry."""
        while position < len(entries) and self._follow(tape, entries[position], position):
            position += 1
        return position

    def divide(self, entries: Sequence[Entry]) -> bool:
        """Whether all tapes take a batch apart into parts of single samples, which are then followed."""
        first = entries[0]
        if _name(first) not in _DIVIDES or len({len(entry.made) for entry in entries}) == 1:
            return False
        whole = first.args[0]
        state = self._state_of(whole)
        dim = positive(_dim(first), len(first.given[id(whole)]))
        if not isinstance(state, Batch) or (state.dim, state.outer) != (dim, 1):
            return False
        rows = self._rows_of_sample(entries, dim)
        if rows is None:
            return False
        self._count += 1
        for tape, entry in enumerate(entries):
            for position, tensor in enumerate(tensors_in(entry.result)):
                sample, place = divmod(position, len(rows))
                self._parts[tape][id(tensor)] = _Part(sample, ("part", self._count, place, dim))
            self._note_uses(tape, entry)
        for tensor in tensors_in(first.result):
            self._give(tensor, _ALONE)
        return True

    def _rows_of_sample(self, entries: Sequence[Entry], dim: int) -> list[int] | None:
        """How many rows the parts of one sample have, into which all tapes take a batch apart. None: samples
        are not taken apart alike.
        """
        of_sample: list[int] | None = None
        for entry, size in zip(entries, self._sizes, strict=True):
            rows = [1 if _name(entry) == "unbind" else shape[dim] for shape in entry.made]
            of_sample = of_sample or rows[: len(rows) // size]
            if rows != of_sample * size:
                return None
        return of_sample

    def join(self, entries: Sequence[Entry]) -> Batch | None:
        """The state of what all tapes join from parts of single samples; None if they do something else.

        Raises:
            UnlikeLoopError: parts are joined, but not each sample's in the same way and in order.
        """
        if not any(self._parts_in(tape, entry) for tape, entry in enumerate(entries)):
            return None
        first = entries[0]
        if _name(first) not in _JOINS or len({_dim(entry) for entry in entries}) > 1:
            raise UnlikeLoopError
        if any(map(self._is_spoiled, first.args[0])) or not self._are_joined_alike(entries):
            raise UnlikeLoopError
        dim = positive(_dim(first), len(first.made[0]))
        rows = first.made[0][dim]
        if rows % self._sizes[0]:
            raise UnlikeLoopError
        return Batch(dim, 1, rows // self._sizes[0])

    def _are_joined_alike(self, entries: Sequence[Entry]) -> bool:
        """Whether all tapes join parts in the samples' order, made by the same formulas of every sample."""
        formulas: list[Hashable] = []
        for parts_by_id, entry, size in zip(self._parts, entries, self._sizes, strict=True):
            parts = [parts_by_id.get(id(tensor)) for tensor in entry.args[0]]
            formulas = formulas or [part.formula for part in parts[: len(parts) // size] if part is not None]
            if parts != [_Part(sample, formula) for sample in range(size) for formula in formulas]:
                return False
        return True

    def _parts_in(self, tape: int, entry: Entry) -> list[_Part]:
        given = tensors_in([entry.args, list(entry.kwargs.values())])
        parts = self._parts[tape]
        return [parts[id(tensor)] for tensor in given if id(tensor) in parts]

    def _follow(self, tape: int, entry: Entry, position: int) -> bool:
        given = self._parts_in(tape, entry)
        in_loop = bool(given) or position < self._until[tape]
        if len({part.sample for part in given}) > 1 or not in_loop or _writes(entry):
            return False
        if not given and torch.Tag.nondeterministic_seeded in entry.func.tags:
            return False
        try:
            arguments = self._formula(tape, (entry.args, tuple(sorted(entry.kwargs.items()))))
        except UnlikeLoopError:
            return False
        for place, tensor in enumerate(tensors_in(entry.result)):
            formula = (str(entry.func), arguments, place, entry.made[place])
            if given:
                self._parts[tape][id(tensor)] = _Part(given[0].sample, formula)
            else:
                self._wholes[tape][id(tensor)] = formula
            if tape == 0:
                self._give(tensor, _ALONE)
        self._note_uses(tape, entry)
        return True

    def _note_uses(self, tape: int, entry: Entry) -> None:
        parts, uses = self._parts[tape], self._last_use[tape]
        made = [uses.get(id(tensor), -1) for tensor in tensors_in(entry.result) if id(tensor) in parts]
        self._until[tape] = max([self._until[tape], *made])

    def _formula(self, tape: int, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return self._formula_of(tape, value)
        if isinstance(value, list | tuple):
            return tuple(self._formula(tape, item) for item in value)
        return (type(value).__name__, repr(value))

    def _formula_of(self, tape: int, tensor: Tensor) -> Hashable:
        if tape == 0 and self._is_spoiled(tensor):
            raise UnlikeLoopError
        part = self._parts[tape].get(id(tensor))
        if part is not None:
            return part.formula
        if id(tensor) in self._wholes[tape]:
            return self._wholes[tape][id(tensor)]
        if self._is_held(tensor):
            return ("held", id(tensor))
        raise UnlikeLoopError


def _last_uses(tape: Sequence[Entry]) -> dict[int, int]:
    """Find the last entry that takes each tensor, by the tensor's id."""
    return {key: position for position, entry in enumerate(tape) for key in entry.given}


def _name(entry: Entry) -> str:
    return str(entry.func.overloadpacket.__name__)


def _dim(entry: Entry) -> int:
    """The argument `dim`; 0 by default."""
    place = [argument.name for argument in entry.func._schema.arguments].index("dim")
    return int(entry.args[place] if place < len(entry.args) else entry.kwargs.get("dim", 0))


def _writes(entry: Entry) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in entry.func._schema.arguments)
