"""Whose gradients are parts where each device computes its own positions of a sequence.

Behind what is gathered, and of a part of the sequence, each device finds a part of every gradient. What all
devices compute alike finds all of it. A parameter may be used in one of these ways, not in both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spindle_cli.operators.sequence.recording import NotBySequenceError, Recording, results_of, storage
from spindle_cli.workload.rules.states import Batch, State
from spindle_cli.workload.rules.tape import Entry, tensors_in

# What a tensor is made of, beside parameters (by storage): another argument of the layer, something gathered,
# a split parameter.
_OTHER, _GATHERED, _SPLIT = "another argument", "gathered", "split"
Source = int | str


@dataclass
class Roles:
    """By storage, the whole parameters whose gradients are parts, and those whose gradients are whole."""

    state_of: Callable[[Tensor], State]
    parts: set[int] = field(default_factory=set)
    whole: set[int] = field(default_factory=set)
    _sources: dict[int, frozenset[Source]] = field(default_factory=dict)

    def follow(
        self,
        recording: Recording,
        others: Iterable[Tensor],
        whole: Collection[int],
        split: Collection[int],
    ) -> None:
        """Go through what a layer does.

        Args:
            others: the layer's arguments beside the trunk.
            whole, split: storages of its parameters that all devices have whole, and have parts of.

        Raises:
            NotBySequenceError: gradients would be part here and whole there.
        """
        self._sources = {key: frozenset({key}) for key in whole}
        self._sources.update({key: frozenset({_SPLIT}) for key in split})
        self._sources.update({storage(t): frozenset({_OTHER}) for t in others if t.requires_grad})
        self._sources.update({key: frozenset({_GATHERED}) for key in recording.gathered_first})
        self._sources.update({storage(inside): frozenset({_SPLIT}) for _, inside in recording.taken_alike})
        for entry in recording.entries:
            self._pass(entry)
        for given, _ in recording.taken_alike:
            self._use_whole(given)
        for _, tensor in results_of(recording):
            if isinstance(self.state_of(tensor), Batch) or not tensor.requires_grad:
                continue
            if self._sources.get(storage(tensor), frozenset()) & {_GATHERED, _SPLIT}:
                raise NotBySequenceError("beside its trunk it gives what split parts of it have made")
            self._use_whole(tensor)
        if self.parts & self.whole:
            raise NotBySequenceError(
                "a parameter is used both for a part of the positions and for all of them"
            )

    def _pass(self, entry: Entry) -> None:
        given = tensors_in([entry.args, list(entry.kwargs.values())])
        is_part = any(isinstance(self.state_of(tensor), Batch) for tensor in given)
        if torch.Tag.nondeterministic_seeded in entry.func.tags and (
            is_part or any(isinstance(self.state_of(tensor), Batch) for tensor in tensors_in(entry.result))
        ):
            place = f" ({entry.place})" if entry.place else ""
            raise NotBySequenceError(f"it draws random numbers for the trunk{place}")
        sources: frozenset[Source] = frozenset().union(
            *(self._sources.get(storage(t), frozenset()) for t in given if t.is_floating_point())
        )
        if entry.grad and (is_part or _GATHERED in sources):
            if _OTHER in sources:
                place = f" ({entry.place})" if entry.place else ""
                raise NotBySequenceError(f"another trained argument is put together with the trunk{place}")
            self.parts.update(source for source in sources if isinstance(source, int))
            sources &= {_GATHERED, _SPLIT}
        for tensor in tensors_in(entry.result):
            if not isinstance(self.state_of(tensor), Batch):
                key = storage(tensor)
                self._sources[key] = self._sources.get(key, frozenset()) | sources

    def _use_whole(self, tensor: Tensor) -> None:
        sources = self._sources.get(storage(tensor), frozenset())
        self.whole.update(source for source in sources if isinstance(source, int))
