"""The forward and backward pass of a placed schedule, with the messages between its slices, as
`account/pass_times.py` runs them. Where devices are processors that communicate and read samples themselves,
their slices take longer for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spindle_cli.account.activations import pass_order
from spindle_cli.account.compute import slice_stretches
from spindle_cli.account.pass_times import Busy, PassRunner, moves_of
from spindle_cli.account.traffic import Traffic
from spindle_cli.costs.beyond_curve import Stalls, stalls
from spindle_cli.costs.shares import OpSeconds, times_of_shares
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.types import Slice


@dataclass(frozen=True)
class Times:
    """Start and end of each slice's pass, by index, and when each device is through with all."""

    start_s: list[float]
    end_s: list[float]
    free_s: list[float]


@dataclass(frozen=True)
class BothPasses:
    """`forward_starts_s`: of each slice's forward pass. `forward_ended_s`: when the last one has ended.
    `on_cards`: when messages are under way between nodes.
    """

    forward_starts_s: list[float]
    forward_ended_s: float
    backward: Times
    on_cards: list[Busy]


class Passes:
    """Both passes of some slices, as often as they are asked for."""

    def __init__(self, problem: Problem, slices: Sequence[Slice], traffic: Traffic) -> None:
        devices = [slice_.devices for slice_ in slices]
        moves = moves_of(traffic.activations, traffic.gradients, problem.cluster, len(slices))
        self._runner = PassRunner(
            pass_order(traffic.plan, traffic.edges), devices, problem.num_devices, moves
        )
        forward_s, backward_s = _passes_s(problem, slices)
        stretches = slice_stretches(
            problem.profile.processor,
            problem.cluster.node_of,
            slices,
            [sum(both) for both in zip(forward_s, backward_s, strict=True)],
            problem.profile.by_name,
            traffic.messages(),
            traffic.collectives,
            problem.profile.accumulate,
        )
        for sent, passes_s in ((traffic.activations, forward_s), (traffic.gradients, backward_s)):
            for exchange in sent:
                passes_s[exchange.taker] += exchange.gather_s
        self._alone_s = forward_s, backward_s
        self.is_stretched = any(times != 1.0 for times in stretches)
        self.forward_s = [seconds * times for seconds, times in zip(forward_s, stretches, strict=True)]
        self._backward_s = [seconds * times for seconds, times in zip(backward_s, stretches, strict=True)]

    def run(self, not_before_s: Mapping[int, float]) -> BothPasses:
        """All passes in their order.

        Args:
            not_before_s: when slices may start their forward pass at the earliest.
        """
        times, count = self._runner.run(self.forward_s, self._backward_s, not_before_s), len(self.forward_s)
        return BothPasses(
            forward_starts_s=times.start_s[:count],
            forward_ended_s=max(times.end_s[:count], default=0.0),
            backward=Times(times.start_s[count:], times.end_s[count:], times.free_s),
            on_cards=times.on_cards,
        )

    def without_processor_s(self) -> float:
        """Seconds of both, were there other processors to communicate and to read samples."""
        return max(self._runner.run(*self._alone_s, {}).free_s)


def _passes_s(problem: Problem, slices: Sequence[Slice]) -> tuple[list[float], list[float]]:
    """Seconds of each slice's forward pass, and of its backward pass, on devices that do nothing else."""
    forward_s: list[float] = []
    backward_s: list[float] = []
    for slice_ in slices:
        op_s = problem.op_s_of(slice_)
        more_s = problem.beyond.op_s(slice_, problem.profile.by_name[slice_.metaop], *op_s)
        waits = _stalls(problem, slice_) if slice_.offload else Stalls()
        forward_s.append(slice_.num_ops * (op_s[0] + more_s[0]) + waits.forward_s)
        backward_s.append(slice_.num_ops * (op_s[1] + more_s[1]) + waits.backward_s)
    return forward_s, backward_s


def _stalls(problem: Problem, slice_: Slice) -> Stalls:
    """How long a slice's passes wait for copies to host memory and back."""
    metaop, cluster, point = problem.profile.by_name[slice_.metaop], problem.cluster, problem.point_of(slice_)
    again_s = point.again * point.forward_s
    op = OpSeconds(point.forward_s, point.backward_s - again_s)
    return stalls(slice_, metaop, cluster, op, times_of_shares(metaop, slice_, cluster))
