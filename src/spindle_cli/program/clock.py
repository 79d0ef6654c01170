"""When each pass runs if every message is sent as soon as it is made: the clock that orders what devices
communicate.

Every rank derives the same times from the plan, in whole ticks, so that all put every message and collective
in one order without asking each other. Nothing waits for these times: a device that is early or late posts in
the same order. But what is posted ahead of something that is made sooner holds it up where a device's
messages go one after another, so messages have the ways to themselves no more than they will have
(`account/pass_times.py`). No two passes end in the same tick: of two devices that hand each other something
then, one has to be first, and only the other can be ready for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spindle_cli.account.activations import Layout
from spindle_cli.account.pass_times import PassRunner, moves_of
from spindle_cli.account.traffic import Exchange, exchange_of
from spindle_cli.account.types import Edge, Pass
from spindle_cli.costs.beyond_curve import forwards_again
from spindle_cli.costs.shares import times_of
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.program.types import Kind

Compute = tuple[Kind, int]  # F or B, and the slice
Interval = tuple[int, int]  # start and end in ticks; a plan with n passes has n ticks to the nanosecond


@dataclass(frozen=True)
class PassClock:
    """`when`: start and end of every pass, each at least 1 ns long, no two with the same end.

    A device's passes are disjoint, in the order in which it runs them; a pass starts no earlier than what it
    takes from those that have ended has come. `forward_ended`: when the last forward pass of all has.
    """

    when: Mapping[Compute, Interval]
    forward_ended: int

    @property
    def ended(self) -> int:
        """When the last pass of all has ended."""
        return max(end for _, end in self.when.values())

    @property
    def backward_began(self) -> int:
        """When the first backward pass of all starts."""
        return min(start for (kind, _), (start, _) in self.when.items() if kind is Kind.BACKWARD)

    def start(self, compute: Compute) -> int:
        """Return the tick at which a pass starts."""
        return self.when[compute][0]

    def end(self, compute: Compute) -> int:
        """Return the tick at which a pass ends."""
        return self.when[compute][1]


class Clocks:
    """Makes the clocks of a plan."""

    def __init__(
        self, plan: Plan, order: Sequence[Pass], layouts: Sequence[Layout], edges: Sequence[Edge]
    ) -> None:
        """`order`: of all passes. `layouts`: of the slices. `edges`: between them."""
        activations, gradients = (
            [exchange_of(plan, layouts, edge, is_gradient=is_gradient) for edge in edges]
            for is_gradient in (False, True)
        )
        moves = moves_of(activations, gradients, plan.cluster, len(plan.slices), _ns)
        indices = range(len(plan.slices))
        self._order, self._num_devices = order, plan.cluster.num_devices
        self._devices = [slice_.devices for slice_ in plan.slices]
        self._runner = PassRunner(order, self._devices, self._num_devices, moves)
        self._computes = [(kind, index) for kind in (Kind.FORWARD, Kind.BACKWARD) for index in indices]
        self._ends = [(self._computes[move.sender], self._computes[move.taker]) for move in moves]
        self._makers = _makers(self._ends)
        self._durations = _all_durations_ns(plan, (activations, gradients))

    @property
    def ticks_per_ns(self) -> int:
        return len(self._order)

    def clock(
        self,
        not_before: Mapping[int, int] | None = None,
        posted: Mapping[tuple[Compute, Compute], int] | None = None,
    ) -> PassClock:
        """Return when passes run.

        Args:
            not_before: of slices that wait for their parameters, the tick from which they may run forward.
            posted: by the passes that make and take it, the tick from which what is handed over may be sent;
                None: all as soon as it is made.
        """
        ticks = self.ticks_per_ns
        posted_ns = [-(-(posted or {}).get(ends, 0) // ticks) for ends in self._ends]
        not_before_ns = {index: -(-tick // ticks) for index, tick in (not_before or {}).items()}
        times = self._runner.run(*self._durations, not_before_ns, posted_ns)
        count = len(self._devices)
        when: dict[Compute, Interval] = {}
        free = [0] * self._num_devices
        # Whole numbers in, whole numbers out. In one nanosecond passes end in their order.
        for place, (index, is_backward) in enumerate(self._order):
            this = index + count * is_backward
            ends = [free[device] for device in self._devices[index]]
            ends += [when[maker][1] for maker in self._makers.get(self._computes[this], ())]
            start = max(int(times.start_s[this]) * ticks, *ends)
            end = int(times.end_s[this]) * ticks + place
            when[self._computes[this]] = start, end
            for device in self._devices[index]:
                free[device] = end
        forward_ended = max(end for (kind, _), (_, end) in when.items() if kind is Kind.FORWARD)
        return PassClock(when, forward_ended)


def _makers(ends: Iterable[tuple[Compute, Compute]]) -> dict[Compute, list[Compute]]:
    """By pass, those that make what it takes."""
    makers: dict[Compute, list[Compute]] = {}
    for maker, taker in ends:
        makers.setdefault(taker, []).append(maker)
    return makers


def _all_durations_ns(plan: Plan, exchanges: Sequence[Sequence[Exchange]]) -> tuple[list[int], list[int]]:
    """The lengths of all forward and backward passes, with what they gather of what `exchanges` bring."""
    forward, backward = map(list, zip(*(_durations_ns(plan, slice_) for slice_ in plan.slices), strict=True))
    for sent, passes in zip(exchanges, (forward, backward), strict=True):
        for exchange in sent:
            passes[exchange.taker] += _ns(exchange.gather_s)
    return forward, backward


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _durations_ns(plan: Plan, slice_: Slice) -> Interval:
    """The lengths of a slice's forward and backward pass: as planned; where the plan has one length for both,
    in the proportion of the curve's point, or one to two where it has no curve.
    """
    if slice_.backward_start_s is not None and slice_.backward_end_s is not None:
        passes_s = slice_.end_s - slice_.start_s, slice_.backward_end_s - slice_.backward_start_s
        return max(1, round(passes_s[0] * 1e9)), max(1, round(passes_s[1] * 1e9))
    op = times_of(plan.by_name[slice_.metaop], slice_, plan.cluster)
    forward, backward = (1.0, 2.0) if op is None or op.forward_s + op.backward_s <= 0 else op[:2]
    backward += forward * forwards_again(slice_, plan.by_name[slice_.metaop]) / slice_.num_ops
    length_ns = (slice_.end_s - slice_.start_s) * 1e9 / (forward + backward)
    return max(1, round(length_ns * forward)), max(1, round(length_ns * backward))
