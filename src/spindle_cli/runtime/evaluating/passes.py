"""Run the forward passes of one task on one batch, of which the last samples may be missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spindle_cli.program.types import Action, Kind, Transfer
from spindle_cli.runtime.communication.rows import Samples, take_rows
from spindle_cli.runtime.communication.transfers import Exchange, Held
from spindle_cli.runtime.evaluating.gathered_loss import GatheredLoss
from spindle_cli.runtime.step.compute import LocalSlice
from spindle_cli.runtime.step.sharded import ForwardWalk, Uses
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec

if TYPE_CHECKING:
    from torch import Tensor

# (samples, names) -> a batch's fields
Fields = Callable[[Samples, Sequence[str]], Mapping[str, "Tensor"]]


@dataclass
class BatchRun:
    """What came of a batch on this rank.

    `loss`: what its shares have of the batch's; None: it has none of it. `results`: of its shares, by key and
    samples.
    """

    loss: Tensor | None = None
    results: dict[tuple[str, Samples], Tensor] = field(default_factory=dict)

    def add_loss(self, loss: Tensor) -> None:
        """Add what a share has of the batch's loss."""
        part = loss.detach().double().reshape(())
        self.loss = part if self.loss is None else self.loss + part


def present(samples: Samples, size: int) -> Samples:
    """Those of a share's samples that are there, in a batch of so many."""
    return samples[0], max(samples[0], min(samples[1], size))


class Passes:
    """One rank's forward passes of a task.

    A batch with fewer samples than the plan's is cut, not filled up: modules run on the samples that are
    there, a share without any runs nothing. Only messages keep their sizes; what is behind the samples in
    them is zeros, and is cut away before anything takes it.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        slices: Mapping[int, LocalSlice],
        exchange: Exchange,
        device: torch.device,
        computing: Callable[[], AbstractContextManager[object]],
        gathered: Mapping[int, GatheredLoss] | None = None,
        uses: Mapping[int, Uses] | None = None,
    ) -> None:
        """`gathered`: by slice, losses that all of its shares compute together. `uses`: by slice, what it
        uses of parameters that are shared out.
        """
        self._actions = tuple(actions)
        self._slices = slices
        self._exchange = exchange
        self._device = device
        self._computing = computing
        self._gathered = gathered or {}
        self._uses = uses or {}

    def run(self, size: int, fields: Fields, loss_arguments: Callable[[Samples], Sequence[Any]]) -> BatchRun:
        """Run a batch of `size` samples; every rank at the same time.

        Args:
            fields: of the batch, by samples and names.
            loss_arguments: what a share of the loss takes, by its samples that are there.
        """
        outputs: dict[int, dict[str, Tensor]] = {}
        batch = BatchRun()
        for action in self._actions:
            if action.slice_index is not None:
                local = self._slices[action.slice_index]
                outputs[action.slice_index] = self._forward(
                    local, size, fields, loss_arguments, outputs, batch
                )
                continue
            assert action.transfer is not None and action.communicator is not None, "else it is a message"
            if action.kind is Kind.RECV:
                self._exchange.post_receives((action.transfer,), action.communicator)
            else:
                self._exchange.post_sends(
                    (action.transfer,),
                    lambda transfer: self._held_for(transfer, outputs),
                    action.communicator,
                )
        self._exchange.finish()
        return batch

    def _held_for(self, transfer: Transfer, outputs: Mapping[int, Mapping[str, Tensor]]) -> Held:
        return self._held(transfer.producer, outputs)

    def _held(self, producer: int, outputs: Mapping[int, Mapping[str, Tensor]]) -> Held:
        def held(spec: ValueSpec, samples: Samples) -> Tensor:
            return take_rows(
                outputs[producer][spec.name], spec, self._slices[producer].samples, samples
            ).contiguous()

        return held

    def _forward(
        self,
        local: LocalSlice,
        size: int,
        fields: Fields,
        loss_arguments: Callable[[Samples], Sequence[Any]],
        outputs: Mapping[int, Mapping[str, Tensor]],
        batch: BatchRun,
    ) -> dict[str, Tensor]:
        """Run a slice on the samples that are there; what it hands on, with room for all."""
        wired, samples = local.wired, local.samples
        there = present(samples, size)
        values: dict[str, Tensor] = {}
        for edge in wired.incoming:
            arrived = self._exchange.complete(
                edge, self._held(edge.edge.producer, outputs), is_gradient=False, group=local.group
            )
            for spec in edge.values:
                values[spec.name] = take_rows(arrived[spec.name], spec, samples, there)
        if there[0] < there[1] or wired.index in self._gathered:
            with torch.no_grad(), self._computing():
                self._run_ops(local, size, there, fields, loss_arguments, values, batch)
        elif wired.index in self._uses:
            ForwardWalk(self._uses[wired.index]).through()
        return {
            spec.name: _with_room(values.get(spec.name), spec, samples, there, self._device)
            for spec in wired.outputs
        }

    def _run_ops(
        self,
        local: LocalSlice,
        size: int,
        there: Samples,
        fields: Fields,
        loss_arguments: Callable[[Samples], Sequence[Any]],
        values: dict[str, Tensor],
        batch: BatchRun,
    ) -> None:
        taken = fields(there, local.wired.fields)
        uses = self._uses.get(local.wired.index)
        walk = None if uses is None else ForwardWalk(uses)
        for number, op, module in zip(
            range(*local.wired.slice.ops), local.wired.ops, local.runnable, strict=True
        ):
            if walk is not None:
                walk.enter(number)
            more = loss_arguments(there) if op.shares is not None else ()
            arguments = [*(taken[name] for name in op.fields), *(values[name] for name in op.inputs)]
            if op.is_loss:
                loss, results = self._loss(local, module, size, there, arguments, more)
                if loss is not None and local.is_first:
                    batch.add_loss(loss)
            else:
                given = _run_op(local.wired.task, op, module, arguments, more)
                values.update(zip(op.outputs, given, strict=False))
                results = list(given[len(op.outputs) :])
            if walk is not None:
                walk.leave(number)
            batch.results.update(
                ((key, there), result) for key, result in zip(op.results, results, strict=True)
            )

    def _loss(
        self,
        local: LocalSlice,
        module: nn.Module,
        size: int,
        there: Samples,
        taken: Sequence[Tensor],
        more: Sequence[Any],
    ) -> tuple[Tensor | None, list[Tensor]]:
        """This share's part of the loss, if it has one, and what is given beside it."""
        together = self._gathered.get(local.wired.index)
        if together is not None:
            return together.run(size, there, taken, more[1:])
        given = _run_op(local.wired.task, local.wired.ops[-1], module, taken, more)
        loss, *results = given
        return loss, results


def _run_op(
    task: TaskGraph, op: Op, module: nn.Module, taken: Sequence[Tensor], more: Sequence[Any]
) -> tuple[Tensor, ...]:
    """All that an op gives in an evaluation; one that asks for gradients itself finds them as in training."""
    if not op.asks_gradients:
        given = module(*taken, *more)
        return given if isinstance(given, tuple) else (given,)
    fields, values = taken[: len(op.fields)], taken[len(op.fields) :]
    leaves = [
        value.detach().requires_grad_(task.values[name].requires_grad)
        for name, value in zip(op.inputs, values, strict=True)
    ]
    with torch.enable_grad():
        given = module(*fields, *leaves, *more)
    return tuple(output.detach() for output in (given if isinstance(given, tuple) else (given,)))


def _with_room(
    value: Tensor | None, spec: ValueSpec, samples: Samples, there: Samples, device: torch.device
) -> Tensor:
    """A share of a value with rows for all of its samples, of which some may not be there."""
    if value is not None and (samples == there or spec.batch_dim is None):
        return value
    room = torch.zeros(spec.shape_of(samples[1] - samples[0]), dtype=spec.dtype, device=device)
    if value is not None:
        take_rows(room, spec, samples, there).copy_(value)
    return room
