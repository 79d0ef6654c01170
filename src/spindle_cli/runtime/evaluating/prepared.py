"""A task made ready to be evaluated on this rank: its graph in eval mode, and its passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from spindle_cli.analysis.evaluation import analyse_evaluation
from spindle_cli.analysis.losses.counts import LossCounter
from spindle_cli.errors import WorkloadError
from spindle_cli.operators.tensor_group import TensorGroup
from spindle_cli.operators.tensor_parallel import PlanSplits
from spindle_cli.program.evaluated import forward_only
from spindle_cli.program.link import link
from spindle_cli.program.proof.proof import prove, prove_forward
from spindle_cli.program.types import Program
from spindle_cli.runtime.communication.communicators import Communicators
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.communication.transfers import Exchange
from spindle_cli.runtime.communication.wiring import Wiring, wire
from spindle_cli.runtime.evaluating.gathered_loss import GatheredLoss, gathers
from spindle_cli.runtime.evaluating.passes import Passes
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.runtime.step.compute import LocalSlice
from spindle_cli.runtime.step.sharded import uses_in
from spindle_cli.training.precision import in_dtype
from spindle_cli.workload.graph import TaskGraph, WorkloadGraph


@dataclass(frozen=True)
class Route:
    """What a task's passes follow: the program of a plan, the part of it that an evaluation runs, the graph
    that belongs to it, and what its messages go over. `traced`: the task in its own numbers.
    """

    program: Program
    forward: Program
    graph: WorkloadGraph
    splits: PlanSplits | None
    communicators: Communicators
    traced: TaskGraph


@dataclass(frozen=True)
class Prepared:
    """A task as it is evaluated: its graph, and this rank's passes of it, along a route."""

    graph: TaskGraph
    wiring: Wiring
    slices: dict[int, LocalSlice]
    passes: Passes
    counter: LossCounter | None
    route: Route


@dataclass(frozen=True)
class Preparing:
    """Makes tasks of a run ready on one rank.

    Attributes:
        source: of the workload.
        communicators: of the program that is trained by. `timeout_s`: of others that are made.
        computing: what passes run in.
        pool: with the parameters that are shared out.
    """

    model: LocalModel
    source: str
    rank: int
    device: torch.device
    communicators: Communicators
    timeout_s: float
    computing: Callable[[], AbstractContextManager[object]]
    pool: GradientPool

    def prepared(self, name: str) -> Prepared:
        """A task, made ready; collective.

        Raises:
            WorkloadError: it cannot be traced in eval mode, or its plan cannot evaluate it.
        """
        route = self._trained(name) if name in self.model.graph.tasks else self._only_evaluated(name)
        return self._along(route, name)

    def at_length(self, planned: Prepared, traced: TaskGraph) -> Prepared:
        """A task at another length, by the same route; of this rank alone.

        Args:
            planned: at the planned length.
            found: at the other one, over the modules of another build.
        """
        name, root = planned.graph.task.name, planned.graph.root
        handed_on = traced.hand_constants_on(root)
        try:
            task = replace(traced, task=planned.graph.task, root=root, varying=planned.graph.varying)
            graph = replace(planned.route.graph, tasks={**planned.route.graph.tasks, name: task})
            return self._along(replace(planned.route, graph=self._in_dtype(graph)), name)
        finally:  # its modules have what they take
            for constant in handed_on:
                delattr(root, constant)

    def _along(self, route: Route, name: str) -> Prepared:
        wiring = wire(route.graph, route.program)
        slices = {
            wired.index: self.model.ops.evaluated(wired, route.splits)
            for wired in wiring.slices
            if self.rank in wired.layout.share_of and wired.task.task.name == name
        }
        for wired in wiring.slices:
            if wired.task.task.name == name and wired.layout.is_shared:
                _require_splittable(wired.slice.label, wired.ops[:-1] if gathers(wired) else wired.ops)
        for local in slices.values():
            layout = local.wired.layout
            if local.group is not None:
                local.group.join(route.communicators.inside(layout, layout.share_of[self.rank]))
        exchange = Exchange(wiring, self.rank, self.device, route.communicators)
        gathered = {
            index: self._gathered(local, route.communicators)
            for index, local in slices.items()
            if gathers(local.wired)
        }
        actions = route.forward.actions[self.rank]
        uses = uses_in(route.program, self.rank, self.pool, 0)
        passes = Passes(actions, slices, exchange, self.device, self.computing, gathered, uses)
        graph = route.graph.tasks[name]
        shares = graph.loss_shares
        counter = LossCounter(graph.root, shares) if shares.num_counts and slices else None
        return Prepared(graph, wiring, slices, passes, counter, route)

    def _gathered(self, local: LocalSlice, communicators: Communicators) -> GatheredLoss:
        layout = local.wired.layout
        group = TensorGroup(layout.devices, layout.share_of[self.rank], self.device)
        group.join(communicators.inside(layout, layout.share_of[self.rank]))
        return GatheredLoss(local.runnable[-1], local.wired, group)

    def _trained(self, name: str) -> Route:
        """Prepare a task that is trained: it is evaluated where it is."""
        model = self.model
        traced = model.graph.evaluations.get(name) or analyse_evaluation(self.source, model.graph, name)
        graph = self._in_dtype(replace(model.graph, tasks={**model.graph.tasks, name: traced}))
        slices = [wired for wired in wire(graph, model.program).slices if wired.task.task.name == name]
        forward = forward_only(model.program, name, {wired.index for wired in slices if gathers(wired)})
        prove_forward(forward, model.program, name)
        return Route(model.program, forward, graph, None, self.communicators, traced)

    def _only_evaluated(self, name: str) -> Route:
        """Prepare a task that is only evaluated: by a plan of its own."""
        part, graph = self.model.evaluated[name], self.model.graph.only_evaluated(name)
        uses = {(metaop.name, op): () for metaop in part.plan.metaops for op in range(metaop.num_ops)}
        program = link(part.plan, uses)
        prove(program)
        forward = forward_only(program, name)
        prove_forward(forward, program, name)
        used = {action.communicator for actions in forward.actions.values() for action in actions}
        communicators = Communicators(
            (communicator for communicator in program.communicators if communicator.index in used),
            self.timeout_s,
        )
        communicators.meet([forward], self.rank, self.device)
        return Route(program, forward, self._in_dtype(graph), part.splits, communicators, graph.tasks[name])

    def _in_dtype(self, graph: WorkloadGraph) -> WorkloadGraph:
        return graph if self.model.dtype is None else in_dtype(graph, self.model.dtype)


def _require_splittable(label: str, ops: Sequence[Any]) -> None:
    """Refuse to evaluate by shares what needs the whole batch in eval mode.

    Raises:
        WorkloadError: an op does.
    """
    for op in ops:
        if op.coupled or op.talks:
            why = op.coupled_because or "a batch norm without running statistics normalises over the batch"
            if op.contrasts:
                why = "its loss compares every sample with every other"
            raise WorkloadError(
                f"{label}: in eval mode its samples depend on each other, and the plan splits its batch: "
                f"{why}",
                hint="List its class in the workload's `coupled`, then profile and plan again.",
            )
