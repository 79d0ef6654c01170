"""Follow samples through code that was recorded for several sizes of the batch.

The operators must be the same for every size; the rule of an operator (rules/table.py) then says what it does
to samples. What no rule covers mixes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from spindle_cli.analysis.fixed import rows_within, state_of_values, values_of
from spindle_cli.analysis.rules.table import states_of
from spindle_cli.analysis.rules.tape import Call, Entry, Operand, Varying, tensors_in
from spindle_cli.analysis.rules.types import WHOLE, Batch, Mixed, MixesError, Reduced, State, Whole
from spindle_cli.analysis.splitting.loops import Loops, UnlikeLoopError
from spindle_cli.workload.building.memory import memory_of

_OTHER_OPERATIONS = "its operations are others for another size of the batch"


@dataclass
class Follower:
    """States of the tensors of one recording.

    Attributes:
        sizes: of the batch, one per tape.
        watched: by storage, the parameters and buffers, for `written`.
        written: of those, the ones that were changed, with the place of the first change.
    """

    follows_loops: ClassVar[bool] = True  # see loops.py

    sizes: tuple[int, ...]
    watched: Mapping[int, str] = field(default_factory=dict)
    written: dict[str, str | None] = field(default_factory=dict)
    _states: dict[int, State] = field(default_factory=dict)
    _mixed_storages: dict[int, Mixed] = field(default_factory=dict)
    # By storage, the tensor through which a sum or mean over the samples was written into it.
    _summed: dict[int, int] = field(default_factory=dict)
    _loops: Loops | None = None

    def give(self, tensor: Tensor, state: State) -> None:
        """Say what a tensor of the first tape is."""
        self._states[id(tensor)] = state

    def state_of(self, tensor: Tensor) -> State:
        """The state of a tensor of the first tape; what was not seen to be made is a constant."""
        if values_of(tensor) is not None:
            return Mixed("its values depend on how many samples the batch has")  # compared where it is used
        mixed = self._mixed_storages.get(memory_of(tensor))
        if mixed is None and self._summed.get(memory_of(tensor), id(tensor)) != id(tensor):
            return Mixed("a sum or mean over the batch was written into its memory")
        return mixed or self._states.get(id(tensor), WHOLE)

    def _is_held(self, tensor: Tensor) -> bool:
        return memory_of(tensor) in self.watched

    def _is_spoiled(self, tensor: Tensor) -> bool:
        return memory_of(tensor) in self._mixed_storages or memory_of(tensor) in self._summed

    def follow(self, tapes: Sequence[Sequence[Entry]]) -> Mixed | None:
        """Give every tensor of the recording its state; a reason where the tapes are not alike."""
        loops = Loops(self.sizes, tapes, self.state_of, self.give, self._is_held, self._is_spoiled)
        self._loops = loops if self.follows_loops else None
        places = [0] * len(tapes)
        while True:
            places = [
                loops.skip(at, tape, place)
                for at, (tape, place) in enumerate(zip(tapes, places, strict=True))
            ]
            left = [tape[place] for tape, place in zip(tapes, places, strict=True) if place < len(tape)]
            if not left:
                return None
            if len(left) < len(tapes) or any(entry.func is not left[0].func for entry in left):
                return Mixed(_OTHER_OPERATIONS, left[0].place)
            try:
                if not self._by_sample(left):
                    self._apply(left)
                    loops.made(left)
            except UnlikeError:
                return Mixed(_OTHER_OPERATIONS, left[0].place)
            places = [place + 1 for place in places]

    def _by_sample(self, entries: Sequence[Entry]) -> bool:
        """Whether a batch is taken apart into single samples, or put together from them again.

        Raises:
            UnlikeError: something else is done with parts of single samples.
        """
        if self._loops is None:
            return False
        if self._loops.divide(entries):
            return True
        try:
            joined = self._loops.join(entries)
            if joined is not None:
                check_shapes(joined, [entry.made[0] for entry in entries], self.sizes)
        except (MixesError, UnlikeLoopError) as error:
            raise UnlikeError from error
        if joined is not None:
            self._states[id(entries[0].result)] = joined
        return joined is not None

    def _apply(self, entries: Sequence[Entry]) -> None:
        first = entries[0]
        if len({len(entry.made) for entry in entries}) > 1:
            raise UnlikeError
        shapes = tuple(zip(*(entry.made for entry in entries), strict=True))
        call = Call(first.func, self.sizes, self._bound(entries), shapes)
        try:
            states = states_of(call)
            for state, seen in zip(states, shapes, strict=True):
                check_shapes(state, seen, self.sizes)
        except MixesError as error:
            states = [Mixed(str(error), first.place)] * len(shapes)
        for tensor, state in zip(tensors_in(first.result), states, strict=True):
            self._states[id(tensor)] = state
        self._note_writes(first, states)

    def _bound(self, entries: Sequence[Entry]) -> dict[str, Any]:
        bound: dict[str, Any] = {}
        for position, argument in enumerate(entries[0].func._schema.arguments):
            values = [
                entry.args[position]
                if position < len(entry.args)
                else entry.kwargs.get(argument.name, argument.default_value)
                for entry in entries
            ]
            bound[argument.name] = self._combined(values, entries)
        return bound

    def _combined(self, values: Sequence[Any], entries: Sequence[Entry]) -> Any:
        """One argument of an operator, of which `values` has what each of the entries was given.

        Raises:
            UnlikeError: they are of different kinds, or lists of different lengths.
        """
        first = values[0]
        if any(type(value) is not type(first) and _kind(value) != _kind(first) for value in values):
            raise UnlikeError
        if isinstance(first, Tensor):
            return self._operand(values, entries)
        if isinstance(first, list | tuple):
            if len({len(value) for value in values}) > 1:
                raise UnlikeError
            return [self._combined(items, entries) for items in zip(*values, strict=True)]
        return first if all(_is_same(value, first) for value in values) else Varying(tuple(values))

    def _operand(self, tensors: Sequence[Tensor], entries: Sequence[Entry]) -> Operand:
        """A tensor that an operator is given; by its values where all sizes of the batch have known ones."""
        shapes = tuple(entry.given[id(tensor)] for entry, tensor in zip(entries, tensors, strict=True))
        dtype = tensors[0].dtype
        known_values = [values for values in map(values_of, tensors) if values is not None]
        if known_values:
            if len(known_values) < len(tensors):
                raise UnlikeError
            state = state_of_values(known_values, self.sizes)
            return Operand(state, shapes, dtype, rows_within(known_values, self.sizes))
        if self._loops is not None and self._loops.is_whole(tensors):
            return Operand(WHOLE, shapes, dtype)
        strides = tuple(entry.strides[id(tensor)] for entry, tensor in zip(entries, tensors, strict=True))
        return Operand(self.state_of(tensors[0]), shapes, dtype, strides=strides)

    def _note_writes(self, entry: Entry, states: Sequence[State]) -> None:
        """Follow changes in place: into views of other tensors, and into parameters and buffers."""
        for position, argument in enumerate(entry.func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = entry.args[position] if position < len(entry.args) else entry.kwargs.get(argument.name)
            for tensor in tensors_in(given):
                name = self.watched.get(memory_of(tensor))
                if name is not None:
                    self.written.setdefault(name, entry.place)
        for state, tensor in zip(states, tensors_in(entry.result), strict=True):
            if isinstance(state, Mixed) and _writes(entry.func):
                self._mixed_storages.setdefault(memory_of(tensor), state)
            elif isinstance(state, Reduced) and _writes(entry.func):
                self._summed.setdefault(memory_of(tensor), id(tensor))


class UnlikeError(Exception):
    """The tapes of two sizes of the batch differ."""


def _is_same(first: Any, second: Any) -> bool:
    """Whether two constants are equal; NaN is as itself."""
    return first is second or first == second or bool(first != first and second != second)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "tensor"
    return "number" if isinstance(value, int | float) else "list" if isinstance(value, list | tuple) else ""


def _writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def check_shapes(state: State, shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> None:
    """Refuse a state that the shapes for several sizes of the batch do not bear out.

    Raises:
        MixesError: they do not.
    """
    if isinstance(state, Mixed):
        return
    expected = list(shapes[0])
    for shape, size in zip(shapes, sizes, strict=True):
        if isinstance(state, Batch) and state.dim < len(expected):
            expected[state.dim] = state.outer * state.inner * size
        if torch.Size(expected) != torch.Size(shape):
            raise MixesError("its size is no multiple of the batch's")


def is_whole(states: Sequence[State]) -> bool:
    """Whether a value has nothing that comes from the batch."""
    return all(isinstance(state, Whole) for state in states)
