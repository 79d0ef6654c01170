"""What a module keeps of one batch for the next: a hidden state, a memory of tokens, a running mean.

A share would go on from its own samples, and a micro-batch from the one before it. What is kept and not read
again (maps of attention, a further loss), or is not made of the batch (angles that save work), is no matter:
every share makes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spindle_cli.analysis.rules.batch_norms import by_fixed_statistics
from spindle_cli.analysis.rules.tape import Entry, Tape, tensors_in
from spindle_cli.analysis.tracing.proxies.attributes import PLAIN, Unknown, unknown_inside
from spindle_cli.analysis.without_data import Remembering, Unread
from spindle_cli.workload.building.attributes import Changes, Memories, watching
from spindle_cli.workload.building.memory import is_by_shape, memory_of, overwritten_by, written_by
from spindle_cli.workload.introspection import OF_TORCH

SOMETHING = "what it keeps"  # of which no name is known


@dataclass(frozen=True)
class Carried:
    """What a forward has made of its samples, of parameters or by chance, and the next one reads.

    Attributes:
        name: what keeps it.
        place: 'file:line' of who reads it.
        is_written: it is memory that lasts, which this was written into, or that each forward writes into.
    """

    name: str
    tensor: Tensor
    place: str | None
    is_written: bool


class Left:
    """What a forward leaves for the next one, wherever: in attributes, objects, classes, files, variables of
    functions, or written into a tensor that is kept.
    """

    def __init__(self, module: nn.Module, tape: Tape, changes: Changes, given: Sequence[Tensor]) -> None:
        """`tape`: of the forward; `changes`: what it has changed; `given`: its arguments' tensors."""
        self._tape = tape
        self._names = {id(tensor): f"self.{name}" for name, tensor in _kept_by(module)}
        self._otherwise = next(iter((*changes.held, *changes.elsewhere)), SOMETHING)
        own_tensors = [*given, *module.parameters()]
        # What is written into parameters and buffers is looked at elsewhere.
        self._buffers = set(map(memory_of, module.buffers()))
        self._written = lasting(tape) - set(map(memory_of, own_tensors)) - self._buffers
        self._is_some = bool(changes or self._written)
        self._of_step = _made_of(tape, own_tensors) if self._is_some else set()

    def read_by(self, again: Callable[[], Any]) -> Iterator[Carried]:
        """What the next forward reads of it, or writes again; `again`: runs it."""
        if not self._is_some:
            return
        tape = Tape()
        with Remembering(), tape, Unread():
            again()
        made, made_again = _made(self._tape), _made(tape)
        written = self._written & (self._of_step | lasting(tape))
        for entry in tape.entries:
            for tensor in tensors_in([*entry.args, *entry.kwargs.values()]):
                is_written = memory_of(tensor) in written
                is_left = (
                    id(tensor) in made
                    and id(tensor) not in made_again
                    and memory_of(tensor) not in self._buffers
                )
                if is_written or (is_left and memory_of(tensor) in self._of_step):
                    name = self._names.get(id(tensor), self._otherwise)
                    yield Carried(name, tensor, entry.place, is_written)


def _kept_by(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a module's attributes and those of its parts, with 'part.attribute'."""
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in OF_TORCH and isinstance(value, Tensor | tuple | list | dict):
                for leaf in pytree.tree_leaves(value):
                    if isinstance(leaf, Tensor):
                        yield (f"{prefix}.{name}" if prefix else name), leaf


def _made(tape: Tape) -> set[int]:
    """The ids of the tensors that operators have made."""
    return {
        id(tensor)
        for entry in tape.entries
        for tensor in tensors_in(entry.result)
        if id(tensor) not in entry.given
    }


def lasting(tape: Tape) -> set[int]:
    """The storages that a forward has written into and that were there before it."""
    created: set[int] = set()
    written: set[int] = set()
    for entry in tape.entries:
        written |= set(map(memory_of, written_by(entry.func, entry.args, entry.kwargs))) - created
        if all(result.alias_info is None for result in entry.func._schema.returns):
            created |= set(map(memory_of, tensors_in(entry.result)))
    return written


def computes_otherwise(
    again: Callable[[], Any], tape: Tape, module: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]
) -> bool:
    """Whether a second run, `again`, computes otherwise than the first, though nothing was seen to change: by
    a number in what `functools.lru_cache` returns, say, or in an object of a library.

    Args:
        tape: of the first, with the arguments `given`.
    """
    second = Tape()
    with Remembering(), second, Unread():
        again()
    others = [*tensors_in(pytree.tree_leaves(given)), *module.parameters()]
    return _work(tape, others) != _work(second, others)


def is_no_matter(
    module: nn.Module,
    run: Callable[..., Any],
    inputs: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
) -> bool:
    """Whether nothing depends on what a forward changes in a module's attributes and buffers, but for what
    is `Carried`: a second one, which finds what the first has made, treats samples as that does and makes
    nothing else; and numbers that it counts on, or that hooks of it note, it never looks at.

    Args:
        run: runs it, with one of `inputs` for each size of the batch.
    """
    try:
        with by_fixed_statistics(module):
            return all(_finds_the_same(module, run, *given) for given in inputs)
    except Exception:  # it cannot work with what it finds
        return False


def _finds_the_same(
    module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    again, first, second = partial(run, *args, **kwargs), Tape(), Tape()
    with watching(module):
        with Remembering(), first, Unread():
            again()
        with watching(module) as more, Remembering(), second, Unread():
            again()
        if more.buffers:
            return False
        others = [*tensors_in(pytree.tree_leaves((args, kwargs))), *module.parameters()]
        if _work(first, others) != _work(second, others):
            return False
        return not (more.elsewhere or more.counted) or _is_unread(module, more.counted, again)


def _work(tape: Tape, others: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """What is done to these tensors and what is made of them, in order."""
    derived = _made_of(tape, others)
    return [
        (entry.func, pytree.tree_map(as_shape, (entry.args, entry.kwargs)))
        for entry in tape.entries
        if derived & set(map(memory_of, tensors_in(entry.result)))
    ]


def as_shape(value: Any) -> Any:
    """A tensor's shape and type, in its place; another value as it is."""
    if isinstance(value, float) and isnan(value):
        return "nan"  # which is equal to itself
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _is_unread(module: nn.Module, names: Sequence[str], again: Callable[[], Any]) -> bool:
    """Whether all that a module changes in attributes, objects, containers, classes and files is plain values
    and lists that grow, and it does the same whatever is there.

    Args:
        names: of attributes, those that it changes.
    """
    with watching(module):
        before, first, second = Memories.of(module), Tape(), Tape()
        dotted = [split_name.rpartition(".") for split_name in names]
        places = [(module.get_submodule(owner), name) for owner, _, name in dotted]
        held = [vars(part).get(name) for part, name in places]
        with Remembering(), first, Unread():
            again()
        pairs = zip(places, held, strict=True)
        counted = [(part, name) for (part, name), old in pairs if _is_unknown(vars(part)[name], old)]
        try:
            with before.changed_replaced(partial(Unknown, "")) as replaced, unknown_inside("", counted):
                if not replaced.is_all:
                    return False
                with Remembering(), second, Unread():
                    again()
        except Exception:  # it looks at them, or does what cannot be done with something unknown
            return False
        others = list(module.parameters())
        return _work(first, others) == _work(second, others)


def _is_unknown(value: Any, old: Any) -> bool:
    """Whether something unknown is to stand in the place of an attribute: not of a container that lasts, of
    which the entries are replaced.
    """
    return isinstance(value, PLAIN) or value is not old


def _made_of(tape: Tape, others: Sequence[Tensor]) -> set[int]:
    """The storages of tensors, and of all that is made of them, written from them or drawn."""
    storages = set(map(memory_of, others))
    for entry in tape.entries:
        if is_by_shape(entry.func):
            continue
        given = set(map(memory_of, tensors_in([*entry.args, *entry.kwargs.values()])))
        if given & storages or torch.Tag.nondeterministic_seeded in entry.func.tags:
            storages |= set(map(memory_of, tensors_in(entry.result)))
            storages |= set(map(memory_of, written_by(entry.func, entry.args, entry.kwargs)))
    return storages


def goes_into(results: Any, tape: Tape, held: Mapping[int, str]) -> tuple[str, ...]:
    """Those of some tensors whose values from before go into what a forward gives, or may in its backward
    pass where a function has one of its own.

    Args:
        held: their names by storage.
    """
    if not held:
        return ()
    given = tensors_in(pytree.tree_leaves(results))
    if _has_own_backward(given):
        return tuple(held.values())
    names_by_storage = {storage: frozenset({name}) for storage, name in held.items()}
    for entry in tape.entries:
        if not is_by_shape(entry.func):
            _follow_names(entry, names_by_storage)
    return tuple(sorted(_names_in(given, names_by_storage)))


def _follow_names(entry: Entry, names_by_storage: dict[int, frozenset[str]]) -> None:
    """Note which of the named tensors' values an operator's results, and what it writes into, now hold."""
    filled = overwritten_by(entry.func, entry.args, entry.kwargs)
    unread = set(map(id, filled))
    read = [t for t in tensors_in([*entry.args, *entry.kwargs.values()]) if id(t) not in unread]
    names = _names_in(read, names_by_storage)
    for target in filled:
        is_whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
        before = frozenset[str]() if is_whole else _names_in([target], names_by_storage)
        names_by_storage[memory_of(target)] = names | before
    for tensor in (*written_by(entry.func, entry.args, entry.kwargs), *tensors_in(entry.result)):
        if id(tensor) not in unread:
            names_by_storage[memory_of(tensor)] = names | _names_in([tensor], names_by_storage)


def _names_in(tensors: Iterable[Tensor], names_by_storage: Mapping[int, frozenset[str]]) -> frozenset[str]:
    nothing = frozenset[str]()
    return nothing.union(*(names_by_storage.get(memory_of(tensor), nothing) for tensor in tensors))


def _has_own_backward(results: Iterable[Tensor]) -> bool:
    """Whether a `torch.autograd.Function` is among what made some tensors."""
    pending = [result.grad_fn for result in results if result.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        fresh = [source for source, _ in node.next_functions if source is not None and source not in seen]
        seen.update(fresh)
        pending += fresh
    return False
