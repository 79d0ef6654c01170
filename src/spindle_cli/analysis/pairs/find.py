"""Which losses that couple the samples of a batch can be split all the same: contrastive ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from spindle_cli.analysis.memo import key_of, portable
from spindle_cli.analysis.pairs.follow import arguments_of
from spindle_cli.analysis.pairs.op_split import NO_ROW
from spindle_cli.analysis.pairs.recipe import Gather, recipe_of_share
from spindle_cli.analysis.rules.types import MixesError
from spindle_cli.analysis.tracing.behaviour import Kinds, name_of
from spindle_cli.analysis.tracing.observe import Observer
from spindle_cli.workload.building.attributes import swapped_tensors
from spindle_cli.workload.graph import LossShares, Op, TaskGraph
from spindle_cli.workload.types import Workload

NAMED = "it is named as contrastive, but it cannot be split: {why}"
# Said of a loss that nobody has named too, where it is known to compare samples in another way.
_TWO_VIEWS = (
    "{before}; as a comparison of samples neither: {why}. Two views of a sample are compared as two tensors, "
    "not joined by torch.cat: torch.logaddexp of the logsumexp of each, as docs/batch-splitting.md shows"
)
_LABELS = "an operator in it gives a mean over the labels that count, which no share knows"
_WHOLE = "it takes a value that is not one per sample from another operator"
_COUNTS_PAIRS = "it is a mean over what is counted of pairs, and shares count their own samples alone"
_NO_PAIRS = "it compares no samples with each other"


_SAMPLES, _DRAWS = 7, 3  # that counts are tried with
_PARTS = slice(3), slice(3, _SAMPLES)


class PairVerdicts:
    """Whether the losses of one workload can be split, equal ones found once."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._known: dict[str, str | None] = {}

    def why_not(self, task: TaskGraph, loss: Op) -> str | None:
        """Why shares of a loss cannot be computed with what is compared gathered; None: they can."""
        key = _described(task, loss, self._observer.kinds)
        memo = self._observer.memo
        told = {} if memo is None else memo.pairs
        if key not in self._known:
            name = key_of(key) or ""
            self._known[key] = told[name] if name in told else _why_not(task, loss)
        return self._known[key]

    def records(self) -> dict[str, str | None]:
        """Return why losses cannot be split, for another process (see `AnalysisMemo`)."""
        return portable(self._known, lambda why: why)


def split_pairs(task: TaskGraph, workload: Workload, verdicts: PairVerdicts) -> TaskGraph:
    """A task with its loss as one that is split, where that is contrastive. Where the workload names it as
    that and it cannot be split, its reason says why; so it does where it joins two views.
    """
    loss = task.ops[-1]
    if not loss.coupled or loss.coupled_because is None or task.task.batch_size < 2:
        return task
    why = verdicts.why_not(task, loss)
    if why is None:
        marked = replace(loss, coupled=False, coupled_because=None, contrasts=True)
    elif loss.target is not None and isinstance(task.root.get_submodule(loss.target), workload.contrastive):
        marked = replace(loss, coupled_because=NAMED.format(why=why))
    else:
        if not why.startswith(NO_ROW):
            return task
        marked = replace(loss, coupled_because=_TWO_VIEWS.format(before=loss.coupled_because, why=why))
    return replace(task, ops=(*task.ops[:-1], marked))


def _why_not(task: TaskGraph, loss: Op) -> str | None:
    try:
        _check(task, loss)
    except MixesError as error:
        return str(error)
    return None


def _check(task: TaskGraph, loss: Op) -> None:
    """Raise MixesError unless a share of a loss can be computed, with what is compared gathered."""
    assert loss.shares is not None, "the last op holds the loss"
    if loss.shares.all_must_count:
        raise MixesError(_LABELS)
    if not loss.inputs or any(task.values[name].batch_dim is None for name in loss.inputs):
        raise MixesError(_WHOLE)
    module = fx.GraphModule(task.root, loss.shares.graph)
    if loss.shares.num_counts and not _counts_add_up(task, loss.shares):
        raise MixesError(_COUNTS_PAIRS)
    recipe = recipe_of_share(module, task, loss, 1.0, task.task.batch_size)
    if not any(isinstance(action, Gather) for action in recipe.actions):
        raise MixesError(_NO_PAIRS)


def _counts_add_up(task: TaskGraph, shares: LossShares) -> bool:
    """Whether what shares count of their own samples adds up to what the batch counts; it is tried."""
    assert shares.counts is not None, "there are counts"
    module = fx.GraphModule(task.root, shares.counts)
    random = torch.Generator().manual_seed(0)
    specs = [task.fields[name] for name in shares.count_fields]

    def drawn(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point:
            return torch.randn(shape, generator=random).to(dtype)
        return torch.randint(0, 2, shape, generator=random).to(dtype)  # a class, an entry of any table

    def counted(fields: Sequence[Tensor], share: float) -> list[Any]:
        return list(module(*fields, share))

    def made_real(tensor: Tensor) -> Tensor:
        return drawn(tensor.shape, tensor.dtype) if tensor.is_meta else tensor

    try:
        with torch.no_grad(), swapped_tensors(module, made_real):
            for _ in range(_DRAWS):
                fields = [drawn((_SAMPLES, *spec.shape[1:]), spec.dtype) for spec in specs]
                first, second = ([field[part] for field in fields] for part in _PARTS)
                parts = zip(
                    counted(first, _PARTS[0].stop / _SAMPLES),
                    counted(second, 1 - _PARTS[0].stop / _SAMPLES),
                    strict=True,
                )
                pairs = zip(counted(fields, 1.0), parts, strict=True)
                if not all(math.isclose(whole, left + right, rel_tol=1e-4) for whole, (left, right) in pairs):
                    return False
    except Exception:  # of what runs on real samples alone, it is not known
        return False
    return True


def _described(task: TaskGraph, loss: Op, kinds: Kinds) -> str:
    """A text that two losses share if the same holds of them."""
    assert loss.shares is not None, "the last op holds the loss"
    facts = loss.shares.num_counts, bool(loss.shares.all_must_count), len(loss.inputs)
    lines = [f"{task.task.batch_size} {facts} {arguments_of(task, loss)} {loss.shares.count_fields}"]
    for graph in (loss.shares.graph, loss.shares.counts):
        lines += [] if graph is None else [described(graph, task, kinds)]
    return "\n".join(lines)


def described(graph: fx.Graph, task: TaskGraph, kinds: Kinds, numbered: int = 1) -> str:
    """A text that two graphs share if they compute the same. `numbered`: with the numbers of layers (1), or
    without them (0).
    """
    return "\n".join(_lines(graph, task, kinds, numbered))


def _lines(graph: fx.Graph, task: TaskGraph, kinds: Kinds, numbered: int) -> Iterator[str]:
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        taken = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda item: f"%{numbers[item]}" if isinstance(item, fx.Node) else item
        )
        yield f"{node.op} {_behaviour(node, task, kinds, numbered)} {taken!r}"


def _behaviour(node: fx.Node, task: TaskGraph, kinds: Kinds, numbered: int) -> str:
    if node.op not in ("call_module", "get_attr"):
        return name_of(node.target) if node.op == "call_function" else str(node.target)
    owner, _, last = str(node.target).rpartition(".")
    held = getattr(task.root.get_submodule(owner), last)
    if isinstance(held, nn.Module):
        return kinds.behaviours(held)[numbered]
    if isinstance(held, Tensor):
        return f"{type(held).__name__} {tuple(held.shape)} {held.dtype} {held.requires_grad}"
    return repr(held)
