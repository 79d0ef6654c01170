"""What HAP's programs take by the curves that plans are made of: an op's seconds on a share, of each type,
and the links of the cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hap_bench.operators import Operator
from hap_bench.program import BOTH_PASSES, Prices, Rule, Step
from spindle_cli.costs.shares import share_on_type
from spindle_cli.files.cluster import Cluster
from spindle_cli.profile.types import MetaOpProfile, Profile


@dataclass(frozen=True)
class Taken:
    """Seconds of an iteration.

    Attributes:
        computed_s: the slowest device's.
        moved_s: nothing of it beside what is computed.
    """

    computed_s: float
    moved_s: float

    @property
    def in_turn_s(self) -> float:
        """As HAP's programs run."""
        return self.computed_s + self.moved_s

    @property
    def hidden_s(self) -> float:
        """If all that can be hidden was: no way to run the program is faster."""
        return max(self.computed_s, self.moved_s)


class Curves:
    """Seconds of operators by a profile, as its clusters' types see it."""

    def __init__(self, profile: Profile, cluster: Cluster, operators: Sequence[Operator]) -> None:
        self._metaops = profile.by_name
        self._types, self._num_devices = cluster.types, cluster.num_devices
        flops: dict[str, float] = defaultdict(float)
        for operator in operators:
            flops[operator.metaop] += operator.flops
        # Of all ops of a MetaOp together, which part an operator is.
        self._part = {operator: operator.flops / flops[operator.metaop] for operator in operators}

    def flops_per_s(self, operators: Sequence[Operator], batch_size: int) -> tuple[float, ...]:
        """Of a device of each type, for the whole model on an even share: HAP's one number."""
        flops = BOTH_PASSES * sum(operator.flops for operator in operators)
        even = batch_size // self._num_devices
        return tuple(
            flops * even / sum(m.num_ops * _share_s(m, kind, even) for m in self._metaops.values())
            for kind in self._types
        )

    def computed_s(self, step: Step, ratios: Sequence[float], samples: Sequence[int]) -> float:
        """The slowest device's; `samples`: of a device of each type."""
        metaop = self._metaops[step.operator.metaop]
        part = self._part[step.operator] * metaop.num_ops
        return part * max(
            self._on(step, metaop, kind, ratio, count)
            for kind, ratio, count in zip(self._types, ratios, samples, strict=True)
        )

    def _on(self, step: Step, metaop: MetaOpProfile, kind: str, ratio: float, samples: int) -> float:
        """Of one op. Cut otherwise than by samples it is taken to lose nothing."""
        whole_s = metaop.batch_size * _least_sample_s(metaop, kind)
        match step.rule:
            case Rule.WHOLE:
                return whole_s
            case Rule.COLUMNS | Rule.ROWS | Rule.HEADS | Rule.EXPERTS:
                return ratio * whole_s
            case Rule.FACTORS:  # a third of both passes is the weight's gradient, here of all samples
                return 2 / 3 * _share_s(metaop, kind, samples) + whole_s / 3
            case Rule.DATA | Rule.GATHERED | Rule.TOUCHED:
                return _share_s(metaop, kind, samples)


def _share_s(metaop: MetaOpProfile, kind: str, samples: int) -> float:
    if not samples:
        return 0.0
    known = share_on_type(metaop, kind, samples, 1)
    if known is None:
        return samples * _least_sample_s(metaop, kind)
    return known.forward_s + known.backward_s


def _least_sample_s(metaop: MetaOpProfile, kind: str) -> float:
    """Of a sample, in the share in which it takes least."""
    shares = [share for share in metaop.shares if share.device == kind and share.tp == 1]
    return min((share.forward_s + share.backward_s) / share.samples for share in shares)


def whole_samples(batch_size: int, counts: Sequence[int], ratios: Sequence[float]) -> tuple[int, ...]:
    """Of a device of each type, the most that one has: rounded down, and what is then missing goes to the
    devices that lack most, one sample each time.
    """
    wanted = [batch_size * ratio for ratio, count in zip(ratios, counts, strict=True) for _ in range(count)]
    given = [int(each) for each in wanted]
    for _ in range(batch_size - sum(given)):
        place = max(range(len(given)), key=lambda device: wanted[device] - given[device])
        given[place] += 1
    most, first = [], 0
    for count in counts:
        most.append(max(given[first : first + count]))
        first += count
    return tuple(most)


def taken_by(
    program: Sequence[Step], ratios: tuple[float, ...], curves: Curves, prices: Prices, batch_size: int
) -> Taken:
    """An iteration of a program."""
    samples = whole_samples(batch_size, prices.counts, ratios)
    return Taken(
        sum(curves.computed_s(step, ratios, samples) for step in program),
        sum(prices.communicated_s(step, ratios) for step in program),
    )
