"""What a module keeps of one batch for the next: a hidden state, a memory of tokens, a running mean.

A share would go on from its own samples, and a micro-batch from the one before it. What is kept and not read
again (maps of attention, a further loss), or is not made of the batch (angles that save work), is no matter:
every share makes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spindle_cli.workload.building.attributes import watching
from spindle_cli.workload.building.writes import written_by
from spindle_cli.workload.rules.remembered import Remembering
from spindle_cli.workload.rules.tape import Tape, tensors_in
from spindle_cli.workload.tracing.proxies.counters import PLAIN, unknown_inside
from spindle_cli.workload.unread import Unread

_TORCHS = frozenset(vars(nn.Module()))  # its own dicts of parameters, buffers, parts and hooks
# Take of a tensor nothing but its shape and type.
_BY_SHAPE = frozenset(
    {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}
)


def kept_by(module: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """The tensors in a module's attributes and those of its parts, by their ids, with 'part.attribute'."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if name in _TORCHS or not isinstance(value, Tensor | tuple | list | dict):
                continue
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor):
                    found[id(leaf)] = (f"{prefix}.{name}" if prefix else name, leaf)
    return found


def carried_on(
    module: nn.Module, before: Mapping[int, object], again: Callable[[], Any]
) -> dict[str, Tensor]:
    """Of what a forward has left in the module's attributes, what the next one reads, by name.

    Args:
        before: what was there before it (`kept_by`).
        again: runs the next one.
    """
    left = {key: kept for key, kept in kept_by(module).items() if key not in before}
    if not left:
        return {}
    tape = Tape()
    with Remembering(), tape, Unread():
        again()
    read = _read_by(tape)
    return {name: tensor for key, (name, tensor) in left.items() if key in read}


def is_no_matter(
    module: nn.Module,
    run: Callable[..., Any],
    inputs: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
) -> bool:
    """Whether nothing depends on what a forward changes in a module's attributes and buffers: a second one,
    which finds what the first has made, treats samples as that does.

    What it makes is made of numbers and sizes, not of samples, parameters or chance, and a second forward
    makes nothing else; and numbers that it counts on it never looks at.

    Args:
        run: runs it, with one of `inputs` for each size of the batch.
    """
    for args, kwargs in inputs:
        again = partial(run, *args, **kwargs)
        with watching(module):
            before, first, second = _held(module), Tape(), Tape()
            with Remembering(), first, Unread():
                again()
            made = [tensor for key, tensor in _held(module).items() if key not in before]
            with watching(module) as more, Remembering(), second, Unread():
                again()
            others = [*tensors_in(pytree.tree_leaves((args, kwargs))), *module.parameters()]
            read = _read_by(second)
            kept = {_storage(tensor) for tensor in made if id(tensor) in read}
            if more.buffers or _made_of(first, others) & kept:
                return False
            if _work(first, others) != _work(second, others):
                return False
            if more.counted and not _is_unread(module, more.counted, again):
                return False
    return True


def _work(tape: Tape, others: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """What is done to these tensors and what is made of them, in order."""
    own = _made_of(tape, others)
    return [
        (entry.func, pytree.tree_map(_as_shape, (entry.args, entry.kwargs)))
        for entry in tape.entries
        if own & set(map(_storage, tensors_in(entry.result)))
    ]


def _as_shape(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _read_by(tape: Tape) -> set[int]:
    """The ids of the tensors that operators take."""
    return {
        id(tensor) for entry in tape.entries for tensor in tensors_in([*entry.args, *entry.kwargs.values()])
    }


def _is_unread(module: nn.Module, names: Sequence[str], again: Callable[[], Any]) -> bool:
    """Whether a module counts in attributes, and does the same whatever is there."""
    counted = []
    for dotted in names:
        owner, _, name = dotted.rpartition(".")
        counted.append((module.get_submodule(owner), name))
    if not all(isinstance(vars(part)[name], PLAIN) for part, name in counted):
        return False
    try:
        with watching(module), unknown_inside("", counted), Remembering(), Unread():
            again()
    except Exception:  # it looks at them, or does what cannot be done with something unknown
        return False
    return True


def _held(module: nn.Module) -> dict[int, Tensor]:
    """The tensors in a module's buffers and attributes, by their ids."""
    kept = {key: tensor for key, (_, tensor) in kept_by(module).items()}
    return kept | {id(buffer): buffer for buffer in module.buffers()}


def _made_of(tape: Tape, others: Sequence[Tensor]) -> set[int]:
    """The storages of tensors, and of all that is made of them, written from them or drawn."""
    found = set(map(_storage, others))
    for entry in tape.entries:
        if entry.func.overloadpacket.__name__ in _BY_SHAPE:
            continue
        given = set(map(_storage, tensors_in([*entry.args, *entry.kwargs.values()])))
        if given & found or torch.Tag.nondeterministic_seeded in entry.func.tags:
            found |= set(map(_storage, tensors_in(entry.result)))
            found |= set(map(_storage, written_by(entry.func, entry.args, entry.kwargs)))
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
