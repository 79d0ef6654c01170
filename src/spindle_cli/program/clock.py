"""When each pass would run if every message were sent at once, and had its way for itself: the clock that
orders what devices communicate.

Every rank derives the same times from the plan, in whole ticks, so that all put every message and collective
in one order without asking each other. Nothing waits for these times: a device that is early or late posts in
the same order. No two passes end in the same tick: of two devices that hand each other something then, one
has to be first, and only the other can be ready for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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

    @classmethod
    def of(
        cls,
        plan: Plan,
        order: Sequence[Pass],
        edges: Iterable[Edge],
        on_their_way_s: Mapping[tuple[Compute, Compute], float],
        not_before: Mapping[int, int] | None = None,
    ) -> PassClock:
        """`order`: of all passes. `on_their_way_s`: of two passes between devices, the seconds that what the
        first hands to the second is on its way. `not_before`: of slices that wait for their parameters, the
        tick from which they may run forward.
        """
        producers: dict[int, list[int]] = {}
        consumers: dict[int, list[int]] = {}
        for edge in edges:
            producers.setdefault(edge.consumer, []).append(edge.producer)
            consumers.setdefault(edge.producer, []).append(edge.consumer)
        when: dict[Compute, Interval] = {}
        free = [0] * plan.cluster.num_devices
        durations = [_durations_ns(plan, slice_) for slice_ in plan.slices]
        for number, (index, is_backward) in enumerate(order):
            kind, before = (Kind.BACKWARD, consumers) if is_backward else (Kind.FORWARD, producers)
            devices = plan.slices[index].devices
            this = kind, index
            ready = 0 if not_before is None else not_before.get(index, 0)
            for dependency in before.get(index, ()):
                moved_s = on_their_way_s.get(((kind, dependency), this), 0.0)
                ready = max(ready, when[kind, dependency][1] + round(moved_s * 1e9) * len(order))
            start = max(ready, *(free[device] for device in devices))
            length = durations[index][is_backward] * len(order)
            end = start + length + (number - start) % len(order)
            when[this] = start, end
            for device in devices:
                free[device] = end
        forward_ended = max(end for (kind, _), (_, end) in when.items() if kind is Kind.FORWARD)
        return cls(when, forward_ended)

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
