"""What a module keeps of one batch for the next: a hidden state, a memory of tokens, a running mean.

A share would go on from its own samples, and a micro-batch from the one before it. What is kept and not read
again (maps of attention, a further loss), or is not made of the batch (angles that save work), is no matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spindle_cli.workload.rules.remembered import Remembering
from spindle_cli.workload.rules.tape import Tape, tensors_in
from spindle_cli.workload.unread import Unread

_TORCHS = frozenset(vars(nn.Module()))  # its own dicts of parameters, buffers, parts and hooks


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
    read = {
        id(tensor) for entry in tape.entries for tensor in tensors_in([*entry.args, *entry.kwargs.values()])
    }
    return {name: tensor for key, (name, tensor) in left.items() if key in read}
