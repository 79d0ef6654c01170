"""Which operators are traced into, as the losses in them can then be split with the task's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from spindle_cli.workload.graph import IGNORED_LABEL, Op, TaskGraph
from spindle_cli.workload.pairs.find import NAMED
from spindle_cli.workload.splitting.coupling import CONTRASTIVE


def better_opened(task: TaskGraph, samples: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Operators that may better be traced into, most of them first: what is in them is then part of the
    task's forward.

    They are the last one, where it gives a loss that is not split or a mean that leaves labels of the
    `samples` out; and those before it that give losses of the whole batch to the last op (contrastive ones,
    in CoCa).
    """
    inside = () if task.loss_inside is None else (task.loss_inside,)
    last = inside if inside and _is_last_better_opened(task, samples) else ()
    terms = [op.target for op in task.ops[:-1] if op.target is not None and _gives_terms(task, op)]
    found = [tuple(dict.fromkeys([*terms, *more])) for more in (last, inside)] if terms else []
    return [names for names in dict.fromkeys([*found, last]) if names]


def said_why(task: TaskGraph, why: str) -> TaskGraph:
    """A task whose contrastive operators could not be traced into, with the reason where they are named."""
    because = NAMED.format(why=why)
    ops = (
        replace(op, coupled_because=because) if op.coupled_because == CONTRASTIVE else op for op in task.ops
    )
    return replace(task, ops=tuple(ops))


def _is_last_better_opened(task: TaskGraph, samples: Mapping[str, Tensor]) -> bool:
    first = max(op.index for op in task.ops if op.target == task.loss_inside)
    if any(op.coupled for op in task.ops[first:]):
        return any(op.coupled_because is not None for op in task.ops[first:])
    trusted = task.loss_shares.all_must_count
    return any(bool((samples[name] == IGNORED_LABEL).any()) for name in trusted)


def _gives_terms(task: TaskGraph, op: Op) -> bool:
    """Whether an operator runs whole, and gives single numbers that the loss alone is made of."""
    if not op.coupled or op.coupled_because is None or not op.outputs:
        return False
    if any(task.values[name].shape != () for name in op.outputs):
        return False
    given = set(op.outputs)
    return all(other.is_loss for other in task.ops if given & set(other.inputs))
