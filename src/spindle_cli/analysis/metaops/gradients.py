"""For which of its inputs an op gives gradients, and whether its forward asks for gradients itself.

A value may have a graph behind it and get no gradient all the same: what uses it ends under `torch.no_grad`,
is detached, or is left out of what is handed on. Plain PyTorch gives its producers none then, and not zeros.
Which ones these are is asked of autograd: every kind of op is run on tensors without data, from the task's
loss back, each from the outputs that a gradient comes back for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from spindle_cli.analysis.autograd import Asking
from spindle_cli.analysis.fixed import rows_of
from spindle_cli.analysis.layer_numbers import Findings
from spindle_cli.analysis.memo import FlowRecord, key_of, portable
from spindle_cli.analysis.pairs.find import described
from spindle_cli.analysis.rules.batch_norms import by_fixed_statistics
from spindle_cli.analysis.splitting.backward import has_others
from spindle_cli.analysis.tracing.behaviour import Kinds
from spindle_cli.analysis.tracing.observe import Observer, failures_unlogged
from spindle_cli.analysis.without_data import Remembering, Unread
from spindle_cli.workload.building.attributes import swapped_tensors, watching
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec


class Flows:
    """How gradients flow through the ops of one workload, equal ones asked once."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._flows: Findings[FlowRecord] = Findings(self._told)

    def into(self, task: TaskGraph) -> TaskGraph:
        """A task whose ops say for which of their inputs they give gradients."""
        # By what the tensors of its layers hold, too: before others stand in their place.
        codes = [_described(task, op, self._observer.kinds) for op in task.ops]
        ops: list[Op] = []
        live: set[str] = set()
        certain: set[str] = set()  # of these, those that a gradient comes back for in every step
        with swapped_tensors(task.root, self._observer.fake):
            for op, code in zip(reversed(task.ops), reversed(codes), strict=True):
                wanted = [0] if op.is_loss else [n for n, name in enumerate(op.outputs) if name in live]
                flow = self._of(task, op, code, wanted)
                given = tuple(op.inputs[place] for place in flow.given)
                sees = flow.is_seen and (op.is_loss or all(op.outputs[n] in certain for n in wanted))
                live.update(given)
                certain.update(given if sees else ())
                marked = replace(op, asks_gradients=flow.asks, changes_gradients=flow.others)
                ops.append(replace(marked, gradients=given, sees_gradients=sees))
        return replace(task, ops=tuple(reversed(ops)))

    def _of(self, task: TaskGraph, op: Op, code: tuple[str, str], wanted: Sequence[int]) -> FlowRecord:
        """Find how gradients flow through an op from the outputs at these places that one comes back for."""
        layer = None if op.target is None else task.root.get_submodule(op.target)
        texts = (f"{code[0]} {wanted}", f"{code[1]} {wanted}")
        return self._flows.of(texts, layer, lambda: _flow(self._observer, task, op, wanted))

    def records(self) -> dict[str, FlowRecord]:
        """Return the records of all flows, for another process (see `AnalysisMemo`)."""
        return portable(self._flows.known, lambda flow: flow)

    def _told(self, text: str) -> FlowRecord | None:
        """What another process has found; None if it says nothing."""
        memo, key = self._observer.memo, key_of(text)
        return None if memo is None or key is None else memo.flows.get(key)


def _described(task: TaskGraph, op: Op, kinds: Kinds) -> tuple[str, str]:
    """Texts that are the same for ops through which gradients flow alike from the same outputs: without the
    numbers of layers, and with them.
    """
    given = [(spec.shape, str(spec.dtype), spec.requires_grad, spec.row) for spec in task.specs_of(op)]
    lines = [described(op.graph, task, kinds, place) for place in (0, 1)]
    return f"{lines[0]}{given}", f"{lines[1]}{given}"


@contextlib.contextmanager
def _without_gradients_left(module: fx.GraphModule) -> Iterator[None]:
    """Drop, at the end, the gradients of the parameters that a module has at the beginning."""
    held = list(module.parameters())
    try:
        yield
    finally:
        for parameter in held:
            parameter.grad = None


def _flow(observer: Observer, task: TaskGraph, op: Op, wanted: Sequence[int]) -> FlowRecord:
    """Run an op of a task, whose tensors are fake, forward, and backward from some of its outputs; of what
    cannot be run so, it is taken that gradients come to all that could have one.
    """
    asking = Asking()
    takes = [place for place, name in enumerate(op.inputs) if task.values[name].requires_grad]
    module = fx.GraphModule(task.root, op.graph)
    made: list[Tensor] = []
    others = False
    try:
        with (
            torch.random.fork_rng(devices=[]),
            observer.mode,
            by_fixed_statistics(module),
            watching(module),
            Remembering(),
            Unread(),
            torch.enable_grad(),
            failures_unlogged(),
        ):
            fields = [_input(task.fields[name]) for name in op.fields]
            made = [_input(task.values[name]) for name in op.inputs]
            with _without_gradients_left(module):
                with asking:
                    result = module(*fields, *made)
                outputs = result if isinstance(result, tuple) else (result,)
                ends = [outputs[place] for place in wanted if outputs[place].requires_grad]
                others = asking.hooks or has_others(ends)
                if ends and takes:
                    torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
    except Exception:  # the user's code, which other runs of it have examined
        others = others or asking.hooks
        return FlowRecord(given=tuple(takes), asks=asking.asks, is_seen=False, others=others)
    given = tuple(place for place in takes if made[place].grad is not None)
    return FlowRecord(given=given, asks=asking.asks, others=others)


def _input(spec: ValueSpec) -> Tensor:
    if spec.row is not None:
        return rows_of(spec.row, spec.shape, spec.dtype)
    return torch.empty(spec.shape, dtype=spec.dtype).requires_grad_(spec.requires_grad)
