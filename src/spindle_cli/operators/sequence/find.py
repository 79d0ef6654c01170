"""Whether the devices that share out a layer's maps can share out the sequence between them, too: found by
what the layer does with a part of its positions, whatever it is called.

Between a rowwise map and the next colwise one every operation of torch has to act on positions one by one, by
the rules that samples are followed by (`analysis/rules/`). The layer is run on parts of several lengths and
on the whole, on the meta device; the split parts in it are given all positions.

`Roles` says whose gradients are parts. Behind what is gathered, and of a part of the sequence, each device
finds a part of every gradient. What all devices compute alike finds all of it. A parameter may be used in one
of these ways, not in both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from spindle_cli.analysis.rules.tape import Entry, tensors_in
from spindle_cli.analysis.rules.types import Batch, Mixed, State, Whole
from spindle_cli.analysis.splitting.follow import Follower
from spindle_cli.analysis.tracing.behaviour import behaviour_of
from spindle_cli.operators.sequence.around import as_they_are, called_on_meta, parameters_beside
from spindle_cli.operators.sequence.recording import (
    Call,
    Maps,
    NotBySequenceError,
    Recording,
    results_of,
    storage,
)
from spindle_cli.operators.sequence.region import argument
from spindle_cli.operators.sequence.types import Argument, Result, SequenceSplit
from spindle_cli.operators.tensor_group import part_sizes
from spindle_cli.workload.graph import Op, TaskGraph

# How reasons of the rules begin, which speak of samples.
_AS_SAMPLES = "of its positions, as if they were samples: "
# Of a trunk: samples, positions, channels.
_FEWEST_DIMS = 3
# Positions for each device; with one alone, a dimension of that size would be broadcast to others.
_FEWEST = 2
# Where batches have several lengths, parts are tried of these, too.
_LENGTHS = (2, 3)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class SplitParts:
    """What tensor parallelism splits of a layer; dotted names inside the task's module.

    Attributes:
        cut: parameters of which each device has a part, or adds what one device alone adds.
        summed: parameters that devices have whole and use for their own part of the layer.
        colwise, rowwise: the maps.
    """

    cut: frozenset[str]
    summed: frozenset[str]
    colwise: tuple[str, ...]
    rowwise: tuple[str, ...]


def find_sequence(task: TaskGraph, op: Op, parts: SplitParts, degree: int) -> SequenceSplit:
    """How `degree` devices share out the sequence of an op's layer.

    Raises:
        NotBySequenceError: they cannot.
    """
    return _Finder(task, op, parts, degree).find()


@dataclass(frozen=True)
class _InLayer:
    """The attributes of a `SequenceSplit` that depend on the layer alone; names are those in the layer."""

    trunk: Argument
    dim: int
    entries: Mapping[str, tuple[Argument, ...]]
    alike: frozenset[str]
    results: tuple[Result, ...]
    partial: frozenset[str]


class _Finder:
    """Finds in one op's layer what can be split by positions."""

    def __init__(self, task: TaskGraph, op: Op, parts: SplitParts, degree: int) -> None:
        """Raises NotBySequenceError: it is not called once, or has hooks."""
        calls = [node for node in op.graph.nodes if node.op == "call_module" and node.target == op.target]
        if len(calls) != 1:
            raise NotBySequenceError("it is called more than once")
        self.layer = task.root.get_submodule(str(op.target))
        if any(getattr(part, hooks) for part in self.layer.modules() for hooks in _HOOKS):
            raise NotBySequenceError("it has hooks, which would see parts of what they are given")
        self._task, self._op, self._parts, self._degree = task, op, parts, degree
        self._node = calls[0]
        self._specs = {
            **{name: task.fields[name] for name in op.fields},
            **{name: task.values[name] for name in op.inputs},
        }

    def find(self) -> SequenceSplit:
        """Finds what `find_sequence` gives, or what was found of an equal call."""
        with called_on_meta(self._task, self._op) as (args, kwargs):
            key = self._key(args, kwargs)
            if key not in self._task.findings:
                try:
                    self._task.findings[key] = self._find(args, kwargs)
                except NotBySequenceError as error:
                    self._task.findings[key] = str(error)
        finding = self._task.findings[key]
        if isinstance(finding, str):
            raise NotBySequenceError(finding)
        return self._named(finding)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """What equal layers that are called alike have in common."""
        given = pytree.tree_map(_described, (args, kwargs))
        trunks = list(self._trunks(args, kwargs))
        parts = [sorted(self._relative(names)) for names in astuple(self._parts)]
        return behaviour_of(self.layer), repr((given, trunks, parts)), self._degree, bool(self._task.varying)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _InLayer:
        why: NotBySequenceError | None = None
        for maps in self._maps():
            for trunk, dim in self._trunks(args, kwargs):
                try:
                    return self._split(Call(self.layer, args, kwargs, maps), trunk, dim)
                except NotBySequenceError as error:
                    why = why or error
        raise why or NotBySequenceError("it takes no tensor with positions")

    def _named(self, in_layer: _InLayer) -> SequenceSplit:
        """What was found of a layer like this, of this one.

        Raises:
            NotBySequenceError: the op uses a parameter that positions share out in another way, too.
        """
        prefix = f"{self._op.target}."
        partial = frozenset(prefix + name for name in in_layer.partial)
        if outside := sorted(partial & parameters_beside(self._task, self._op, self._node)):
            raise NotBySequenceError(f"{outside[0]} is used outside of it, too")
        taken, kept = as_they_are(self._op, self._node, in_layer.trunk, in_layer.results)
        return SequenceSplit(
            layer=str(self._op.target),
            dim=in_layer.dim,
            trunk=in_layer.trunk,
            entries={prefix + name: places for name, places in in_layer.entries.items()},
            alike=frozenset(prefix + name for name in in_layer.alike),
            results=in_layer.results,
            partial=partial,
            taken=taken,
            kept=kept,
        )

    def _maps(self) -> Iterator[Maps]:
        """Where parts may be gathered: before the largest modules that hold split parameters alone, or before
        the colwise maps themselves.
        """
        colwise, rowwise = self._relative(self._parts.colwise), self._relative(self._parts.rowwise)
        largest = frozenset(self._around(name) for name in colwise)
        yield Maps(largest, colwise, rowwise)
        if largest != colwise:
            yield Maps(colwise, colwise, rowwise)

    def _relative(self, names: Iterable[str]) -> frozenset[str]:
        return frozenset(name.removeprefix(f"{self._op.target}.") for name in names)

    def _around(self, colwise: str) -> str:
        """The largest module of the layer around a map that holds split parameters alone."""
        outermost, split = colwise, self._parts.cut | self._parts.summed
        while (outer := outermost.rpartition(".")[0]) and all(
            f"{self._op.target}.{outer}.{name}" in split
            for name, _ in self.layer.get_submodule(outer).named_parameters(remove_duplicate=False)
        ):
            outermost = outer
        return outermost

    def _trunks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Argument, int]]:
        """Arguments that may be the trunk, and the dimension of its positions."""
        given: list[tuple[Argument, Any]] = [*enumerate(args), *kwargs.items()]
        for place, value in given:
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > _FEWEST_DIMS - 1:
                spec = self._specs.get(self._name_of(place) or "")
                yield place, 0 if spec is not None and spec.batch_dim == 1 else 1

    def _name_of(self, place: Argument) -> str | None:
        """The field or value that the op gives the layer as this argument."""
        source = argument(place, self._node.args, self._node.kwargs)
        return str(source.target) if isinstance(source, fx.Node) and source.op == "placeholder" else None

    def _split(self, call: Call, trunk: Argument, dim: int) -> _InLayer:
        """Records the layer with this argument as its residual stream, and finds how it is split.

        Raises:
            NotBySequenceError: it cannot be shared out.
        """
        size = argument(trunk, call.args, call.kwargs).shape[dim]
        if size < _FEWEST * self._degree:
            raise NotBySequenceError(f"it has {size} positions, too few for {self._degree} devices")
        sizes = part_sizes(size, self._degree)
        lengths = tuple(dict.fromkeys((sizes[0], size, sizes[-1], *(_LENGTHS if self._task.varying else ()))))
        runs = [call.record(trunk, dim, length) for length in lengths]
        recording, part, others = runs[0]
        recordings = [run for run, *_ in runs]
        follower = self._followed(recordings, lengths, part, dim)
        for joined in recording.joined:
            _require_part(follower, joined, dim)
        results: list[Result] = []
        for place, tensor in results_of(recording):
            if not isinstance(follower.state_of(tensor), Whole):
                _require_part(follower, tensor, dim)
                results.append(place)
        if not results:
            raise NotBySequenceError("it gives nothing with positions")
        entries, alike = _of_all_calls(recordings)
        return _InLayer(
            trunk=trunk,
            dim=dim,
            entries={name: places for name, places in entries.items() if places},
            alike=frozenset(name for name, is_alike in alike.items() if is_alike),
            results=tuple(results),
            partial=self._partial(follower, recording, others),
        )

    def _followed(
        self, recordings: Sequence[Recording], lengths: tuple[int, ...], trunk: Tensor, dim: int
    ) -> Follower:
        """Follow the positions of the trunk of the first recording through recordings of several lengths.

        Raises:
            NotBySequenceError: they depend on each other, or the layer changes a parameter or buffer.
        """
        follower = Follower(lengths, self._held())
        follower.give(trunk, Batch(dim))
        mixed = follower.follow([recording.entries for recording in recordings])
        if mixed is not None:
            raise NotBySequenceError(f"{_AS_SAMPLES}{mixed}")
        for name in follower.written:
            raise NotBySequenceError(f"it changes {name!r}")
        return follower

    def _held(self) -> dict[int, str]:
        """By storage, the layer's parameters and buffers."""
        named = [*self.layer.named_parameters(), *self.layer.named_buffers()]
        return {storage(tensor): name for name, tensor in named}

    def _partial(self, follower: Follower, recording: Recording, others: Sequence[Tensor]) -> frozenset[str]:
        """The parameters whose gradients are found in parts, besides those that are split anyway."""
        held = dict(self.layer.named_parameters(remove_duplicate=False))
        cut, summed = (
            {storage(held[name]) for name in self._relative(names) if name in held}
            for names in (self._parts.cut, self._parts.summed)
        )
        whole = {storage(parameter) for parameter in held.values() if parameter.requires_grad} - cut - summed
        roles = Roles(follower.state_of)
        roles.follow(recording, others, whole, cut)
        return frozenset(name for name, parameter in held.items() if storage(parameter) in roles.parts)


def _require_part(follower: Follower, tensor: Tensor, dim: int) -> None:
    """Raises NotBySequenceError: it does not have one entry for each position along the dimension."""
    state = follower.state_of(tensor)
    if isinstance(state, Mixed):
        raise NotBySequenceError(f"{_AS_SAMPLES}{state}")
    if state != Batch(dim):
        raise NotBySequenceError(f"what it gives does not lie along dimension {dim}")


def _of_all_calls(
    recordings: Sequence[Recording],
) -> tuple[dict[str, tuple[Argument, ...]], dict[str, bool]]:
    """Join what was recorded of all calls: for each module what is gathered, and for each colwise map whether
    it takes what all devices have alike.

    Raises:
        NotBySequenceError: it is one thing in one call, and another in the next.
    """
    entries: dict[str, tuple[Argument, ...]] = {}
    alike: dict[str, bool] = {}
    for recording in recordings:
        for name, calls in recording.entered.items():
            if {entries.setdefault(name, calls[0])} != set(calls):
                raise NotBySequenceError(f"{name} is given a part of the sequence in some calls only")
        for name, kinds in recording.alike.items():
            if {alike.setdefault(name, kinds[0])} != set(kinds):
                raise NotBySequenceError(f"{name} is given a part of the sequence in some calls only")
    return entries, alike


def _described(value: Any) -> object:
    if not isinstance(value, Tensor):
        return value
    return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.requires_grad}"


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
        self._note(_SPLIT, split)
        self._note(_OTHER, (storage(tensor) for tensor in others if tensor.requires_grad))
        self._note(_GATHERED, recording.gathered_first)
        self._note(_SPLIT, (storage(inside) for _, inside in recording.taken_alike))
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

    def _note(self, source: Source, storages: Iterable[int]) -> None:
        """Note of what, alone, the tensors in some storages are made."""
        self._sources.update(dict.fromkeys(storages, frozenset({source})))

    def _pass(self, entry: Entry) -> None:
        given = tensors_in([entry.args, list(entry.kwargs.values())])
        place = f" ({entry.place})" if entry.place else ""
        is_part = any(isinstance(self.state_of(tensor), Batch) for tensor in given)
        if torch.Tag.nondeterministic_seeded in entry.func.tags and (
            is_part or any(isinstance(self.state_of(tensor), Batch) for tensor in tensors_in(entry.result))
        ):
            raise NotBySequenceError(f"it draws random numbers for the trunk{place}")
        sources: frozenset[Source] = frozenset().union(
            *(self._sources.get(storage(t), frozenset()) for t in given if t.is_floating_point())
        )
        if entry.grad and (is_part or _GATHERED in sources):
            if _OTHER in sources:
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
