"""Programs: how all devices compute each operator of a chain together, and what moves between them.

Between operators a tensor is cut by samples or by features, or whole on every device. What a rule moves it
moves forward and backward: where the forward pass gathers, the backward pass scatters or cuts, and the other
way round. Nothing is computed while something moves, as in HAP's price of a program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from hap_bench.operators import Kind, Operator
from spindle_cli.costs.links import all_gather_s, all_reduce_s
from spindle_cli.costs.parameters import ID_BYTES
from spindle_cli.files.cluster import Cluster

# Forward and backward together, of the forward pass.
BOTH_PASSES = 3


class Layout(Enum):
    """How a tensor lies on the devices."""

    SAMPLES = auto()
    FEATURES = auto()
    WHOLE = auto()


class Rule(Enum):
    """How an operator is computed."""

    DATA = "samples, gradients summed"
    FACTORS = "samples, factors of gradients gathered"
    TOUCHED = "samples, rows of gradients gathered"
    GATHERED = "samples, parameters gathered"
    COLUMNS = "outputs"
    ROWS = "inputs"
    HEADS = "features"
    EXPERTS = "experts"
    WHOLE = "whole on every device"


class Moving(Enum):
    """Kinds of collective."""

    SUM = auto()
    GATHER = auto()  # or a scatter, which takes as long
    EXCHANGE = auto()


Moved = Mapping[Moving, float]  # bytes of the whole tensors


@dataclass(frozen=True)
class Step:
    """An operator by a rule.

    Attributes:
        moved: bytes in both passes, with those that bring the input into the layout that the rule takes.
        flops: of both passes and the whole batch: cut by the ratios, and computed by every device as a whole.
    """

    operator: Operator
    rule: Rule
    given: Layout
    moved: Moved
    cut_flops: float
    whole_flops: float = 0.0


def steps_from(layout: Layout, operator: Operator, batch_size: int) -> Iterator[Step]:
    """Every way to compute an operator whose input lies as `layout`."""
    for rule, taken, given in _rules(operator):
        moved = dict(_converted(layout, taken, operator.in_bytes * batch_size))
        for kind, num_bytes in _moved_by(rule, operator, batch_size).items():
            moved[kind] = moved.get(kind, 0.0) + num_bytes
        flops = BOTH_PASSES * operator.flops * batch_size
        if rule is Rule.WHOLE:
            yield Step(operator, rule, given, moved, 0.0, flops)
            continue
        # Every device multiplies the factors of all samples instead of its own.
        extra = operator.flops * batch_size if rule is Rule.FACTORS else 0.0
        yield Step(operator, rule, given, moved, flops - extra, extra)


def _rules(operator: Operator) -> Iterator[tuple[Rule, Layout, Layout]]:
    """Each with the layouts that it takes and gives."""
    yield Rule.DATA, Layout.SAMPLES, Layout.SAMPLES
    yield Rule.WHOLE, Layout.WHOLE, Layout.WHOLE
    if operator.param_bytes:
        yield Rule.GATHERED, Layout.SAMPLES, Layout.SAMPLES
    if operator.kind is Kind.DENSE:
        yield Rule.FACTORS, Layout.SAMPLES, Layout.SAMPLES
        yield Rule.COLUMNS, Layout.WHOLE, Layout.FEATURES
        yield Rule.ROWS, Layout.FEATURES, Layout.SAMPLES
        yield Rule.ROWS, Layout.FEATURES, Layout.WHOLE
    if operator.kind is Kind.FEATURES:
        yield Rule.HEADS, Layout.FEATURES, Layout.FEATURES
    if operator.kind is Kind.LOOKUP:
        yield Rule.TOUCHED, Layout.SAMPLES, Layout.SAMPLES
    if operator.kind is Kind.EXPERTS:
        yield Rule.EXPERTS, Layout.SAMPLES, Layout.SAMPLES


def _moved_by(rule: Rule, operator: Operator, batch_size: int) -> Moved:
    taken, given = operator.in_bytes * batch_size, operator.out_bytes * batch_size
    match rule:
        case Rule.DATA:
            return {Moving.SUM: operator.param_bytes}
        case Rule.FACTORS:
            return {Moving.GATHER: taken + given}
        case Rule.TOUCHED:  # a row for each token, and its id
            return {Moving.GATHER: given + operator.tokens * batch_size * ID_BYTES}
        case Rule.GATHERED:  # forward and backward, and the gradients scattered
            return {Moving.GATHER: 3 * operator.param_bytes}
        case Rule.ROWS:  # each device has an addend of all outputs; their gradients are gathered
            return {Moving.GATHER: 2 * given}
        case Rule.EXPERTS:  # to the experts and back, in both passes
            return {Moving.EXCHANGE: 2 * (taken + given)}
        case Rule.COLUMNS | Rule.HEADS | Rule.WHOLE:
            return {}


def _converted(layout: Layout, taken: Layout, num_bytes: float) -> Moved:
    """What brings a tensor from one layout into another, and its gradient back."""
    if layout is taken:
        return {}
    if Layout.WHOLE in (layout, taken):
        # Gathered one way; the other way scattered, as each device has an addend of the gradient, or cut.
        return {Moving.GATHER: (2 if taken is Layout.WHOLE else 1) * num_bytes}
    return {Moving.EXCHANGE: 2 * num_bytes}


@dataclass(frozen=True)
class Prices:
    """What moving and computing takes on a cluster.

    Attributes:
        flops_per_s: of one device of each type, one number for all operators, as HAP has it.
    """

    cluster: Cluster
    flops_per_s: tuple[float, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Devices of each type."""
        return tuple(self.cluster.num_of_type.values())

    def moved_s(self, kind: Moving, num_bytes: float) -> float:
        """Seconds of a collective over all devices with equal shares."""
        devices = range(self.cluster.num_devices)
        match kind:
            case Moving.SUM:
                return all_reduce_s(num_bytes, devices, self.cluster)
            case Moving.GATHER:
                return all_gather_s(num_bytes, devices, self.cluster)
            case Moving.EXCHANGE:
                return self._exchanged_s(num_bytes)

    def _exchanged_s(self, num_bytes: float) -> float:
        """Every node sends to each other one: what leaves it goes through its cards."""
        nodes = len(self.cluster.node_sizes)
        link = self.cluster.links_among(range(nodes)).inter_node
        leaving = num_bytes / nodes * (nodes - 1) / nodes
        speed = min(self.cluster.cards_of_node) * link.bandwidth_bytes_per_s
        return 0.0 if nodes == 1 else link.latency_s + leaving / speed

    def padding(self, ratios: tuple[float, ...]) -> float:
        """By how much a gather or exchange of unequal shares is longer, each padded to the largest."""
        return self.cluster.num_devices * max(ratios)

    def step_s(self, step: Step, ratios: tuple[float, ...]) -> float:
        """Seconds of a step.

        Args:
            ratios: of the batch, or of what else is cut, that a device of each type has.
        """
        return self.computed_s(step, ratios) + self.communicated_s(step, ratios)

    def computed_s(self, step: Step, ratios: tuple[float, ...]) -> float:
        """The slowest device's."""
        return max(
            (step.cut_flops * ratio + step.whole_flops) / speed
            for ratio, speed in zip(ratios, self.flops_per_s, strict=True)
        )

    def communicated_s(self, step: Step, ratios: tuple[float, ...]) -> float:
        """Of both passes."""
        total_s = 0.0
        for kind, num_bytes in step.moved.items():
            padding = 1.0 if kind is Moving.SUM else self.padding(ratios)
            total_s += padding * self.moved_s(kind, num_bytes)
        return total_s
