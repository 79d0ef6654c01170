"""Placement: which devices each slice of a schedule gets.

Pieces are placed in order of start, among the devices that are free then; any of them keeps the schedule
(`calendar.py` has the exception). A device is worth the seconds that it saves: rows of the inputs and
parameters that it already holds, at the speed of the link that they would take otherwise. Devices of one node
are taken together; a slice takes the node where it is worth most, and of equals the one that it fills best.
Of each node it takes whole tensor-parallel groups. Devices without room for a slice are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from spindle_cli.costs.memory import inner_bytes
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.placing.calendar import Calendar, has_groups, of_type, whole_groups
from spindle_cli.plan.placing.usage import Footprint, Usage
from spindle_cli.plan.problem import Point, Problem
from spindle_cli.plan.schedule import Candidate, Placed, UnplacedSlice


@dataclass(frozen=True)
class PlacementWeights:
    """What a placement values.

    Attributes:
        parameters: weight of a byte of parameters that need not be held and summed on one more device,
            against a byte
            of input that need not be moved.
        balance: weight of a byte that a device already holds, against it; spreads memory.
    """

    parameters: float = 0.5
    balance: float = 0.0


WEIGHTS = (PlacementWeights(), PlacementWeights(balance=0.02), PlacementWeights(parameters=4.0))
BALANCED = PlacementWeights(parameters=1.0, balance=1.0)


class DoesNotFitError(Exception):
    """A slice finds too few devices with room; `slice` is the one."""

    def __init__(self, slice_: UnplacedSlice, room: int) -> None:
        super().__init__(f"{slice_}: room on {room} devices only")
        self.slice_ = slice_
        self.room = room


def place(
    problem: Problem,
    candidate: Candidate,
    weights: PlacementWeights,
    *,
    one_part_at_once: bool = False,
) -> Placed:
    """Devices for every slice, in the order in which they hold its batch's shares.

    Args:
        one_part_at_once: devices are to run each part of the MetaGraph forward and backward before the next.

    Raises:
        DoesNotFitError: a slice finds no room on enough of the devices that are free when it can start.
    """
    capacities = list(problem.cluster.usable_bytes)
    usage = Usage(capacities, one_part_at_once=one_part_at_once)
    placing = _Placing(problem, candidate, weights, usage)
    devices = tuple(placing.place(slice_) for slice_ in candidate.pieces)
    return Placed(candidate, devices)


def place_in_sequence(problem: Problem, candidate: Candidate) -> Placed:
    """The lowest free devices for every slice, wherever its inputs are: what locality is compared with."""
    calendar = Calendar(problem, candidate)
    placed: list[tuple[int, ...]] = []
    for slice_ in candidate.pieces:
        free = calendar.available(slice_, list)
        chosen = whole_groups(free, slice_.point.dp, slice_.point.tp, problem.cluster.node_of)
        assert chosen is not None, "a point of the problem has its groups where all devices are free"
        calendar.take(slice_, chosen)
        placed.append(chosen)
    return Placed(candidate, tuple(placed))


@dataclass(frozen=True)
class _Rows:
    """Which share [first, last) of the batch, of 1, each device holds of a tensor of so many bytes."""

    held: dict[int, tuple[float, float]]
    num_bytes: int


class _Placing:
    """A placement under way."""

    def __init__(
        self, problem: Problem, candidate: Candidate, weights: PlacementWeights, usage: Usage
    ) -> None:
        self.problem = problem
        self.cluster: Cluster = problem.cluster
        self.weights = weights
        self.usage = usage
        self.calendar = Calendar(problem, candidate)
        self.outputs: dict[int, _Rows] = {}  # node -> its latest slice's output
        # Bytes that an inter-node link moves while a link inside a node moves one.
        links = problem.cluster.links
        self.node_share = links.inter_node.bandwidth_bytes_per_s / links.intra_node.bandwidth_bytes_per_s

    def place(self, slice_: UnplacedSlice) -> tuple[int, ...]:
        footprint = Footprint(self.problem, slice_)
        free = self.calendar.available(slice_, partial(self._with_room, footprint))
        if not has_groups(free, slice_.point, self.cluster):
            raise DoesNotFitError(slice_, len(free))
        sources = self._sources(slice_)
        value = {d: self._value(d, sources, footprint) for d in free}
        ordered: tuple[int, ...] = ()
        for members, num_devices in self._parts(free, slice_.point):
            chosen = self._choose(members, num_devices, slice_.point.tp, value, sources)
            dp = num_devices // slice_.point.tp
            ordered += _in_order_of_rows(chosen, dp, slice_.point.tp, sources, self.cluster.node_of)
        self._record(slice_, ordered, footprint)
        return ordered

    def _parts(self, free: Sequence[int], point: Point) -> Iterator[tuple[Sequence[int], int]]:
        """How many devices of each type an allocation takes: from each type's own."""
        if point.counts is None:
            yield free, point.num_devices
            return
        for kind, count in zip(self.cluster.types, point.counts, strict=True):
            if count:
                yield of_type(free, kind, self.cluster), count

    def _with_room(self, footprint: Footprint, devices: Sequence[int]) -> list[int]:
        return [device for device in devices if self.usage.fits(device, footprint)]

    def _sources(self, slice_: UnplacedSlice) -> list[_Rows]:
        """What the slice takes in: from its MetaOp's slice before it, or from the MetaOp's inputs."""
        node = self.problem.nodes[slice_.node]
        producers = self.problem.producers[node.metaop.name]
        if slice_.first == 0:
            return [self.outputs[j] for j in producers]
        before = slice_.node if slice_.first > node.first_op or node.continues is None else node.continues
        every_op = set(node.metaop.inputs_of_every_op)
        taken = [self.outputs[j] for j in producers if self.problem.nodes[j].metaop.name in every_op]
        return [_Rows(self.outputs[before].held, inner_bytes(node.metaop)), *taken]

    def _value(self, device: int, sources: Sequence[_Rows], footprint: Footprint) -> float:
        """Bytes that need not move or be held twice if the device runs the slice."""
        value = self.weights.parameters * self.usage.shared_bytes(device, footprint)
        if self.weights.balance:
            value -= self.weights.balance * self.usage.after(device, footprint)
        for rows in sources:
            if device in rows.held:
                first, last = rows.held[device]
                value += rows.num_bytes * (last - first)
        return value

    def _choose(
        self,
        free: Sequence[int],
        num_devices: int,
        tp: int,
        value: dict[int, float],
        sources: Sequence[_Rows],
    ) -> list[int]:
        """Node by node: the one that is worth most, then the one that fits best, until there are enough.
        Whole groups of each.
        """
        by_node: dict[int, list[int]] = {}
        for device in free:
            by_node.setdefault(self.cluster.node_of[device], []).append(device)
        for devices in by_node.values():
            devices.sort(key=lambda d: -value[d])
        near = self._bytes_by_node(sources)

        def worth(node: int, missing: int) -> tuple[bool, float, int, int]:
            devices = by_node[node]
            usable = len(devices) // tp * tp
            enough = usable >= missing
            held_value = sum(value[d] for d in devices[: min(missing, usable)])
            nearby = near.get(node, 0.0) * (1 - self.node_share)
            # A node that holds all that is missing first; then by worth; then the tightest (or fullest) fit.
            return enough, held_value + nearby, -len(devices) if enough else usable, -node

        chosen: list[int] = []
        most = max(len(devices) for devices in by_node.values()) // tp * tp
        # As long as no node has enough, all that it has counts, whatever is missing.
        best_last = sorted(by_node, key=lambda node: worth(node, most + 1))
        while missing := num_devices - len(chosen):
            node = best_last.pop() if missing > most else max(by_node, key=lambda n: worth(n, missing))
            devices = by_node.pop(node)
            wanted = min(missing, len(devices) // tp * tp)
            chosen += _best(devices, wanted, value, sources) if wanted else []
        return chosen

    def _bytes_by_node(self, sources: Sequence[_Rows]) -> dict[int, float]:
        """Bytes of the inputs that each node holds."""
        near: dict[int, float] = {}
        for rows in sources:
            for device, (first, last) in rows.held.items():
                node = self.cluster.node_of[device]
                near[node] = near.get(node, 0.0) + rows.num_bytes * (last - first)
        return near

    def _record(self, slice_: UnplacedSlice, devices: tuple[int, ...], footprint: Footprint) -> None:
        dp, tp = slice_.point.dp, slice_.point.tp
        rows = slice_.point.rows or range(dp + 1)
        held = {d: (rows[p // tp] / rows[-1], rows[p // tp + 1] / rows[-1]) for p, d in enumerate(devices)}
        self.outputs[slice_.node] = _Rows(held, self.problem.nodes[slice_.node].metaop.output_bytes)
        self.calendar.take(slice_, devices)
        self.usage.add(devices, footprint)


def _best(
    devices: Sequence[int], number: int, value: dict[int, float], sources: Sequence[_Rows]
) -> list[int]:
    """So many of the devices, which come in descending value; of equals, those with rows evenly apart."""
    if len(devices) <= number:
        return list(devices)
    least = value[devices[number - 1]]
    better = [d for d in devices if value[d] > least]
    equals = [d for d in devices if value[d] == least]
    middle = _middles(equals, sources)
    equals.sort(key=lambda d: (middle.get(d, 2.0), d))
    wanted = number - len(better)
    return better + [equals[k * len(equals) // wanted] for k in range(wanted)]


def _middles(devices: Sequence[int], sources: Sequence[_Rows]) -> dict[int, float]:
    """Middle of the rows that each device holds, 0 to 1; devices that hold none are left out."""
    middle: dict[int, float] = {}
    weight: dict[int, int] = {}
    for rows in sources:
        for device in devices:
            if device in rows.held:
                first, last = rows.held[device]
                weight[device] = weight.get(device, 0) + rows.num_bytes + 1
                middle[device] = middle.get(device, 0.0) + (rows.num_bytes + 1) * (first + last) / 2
    return {device: middle[device] / weight[device] for device in middle}


def _in_order_of_rows(
    devices: Sequence[int], dp: int, tp: int, sources: Sequence[_Rows], node_of: Sequence[int]
) -> tuple[int, ...]:
    """The devices in an order in which each holds as much as possible of its share already.

    With tensor parallelism, the devices of a share are neighbours: as the devices come in whole groups of
    each node, and are numbered node by node, of one node.
    """
    if tp > 1:
        return tuple(sorted(devices))
    middle = _middles(devices, sources)
    holders = sorted(middle, key=lambda d: (middle[d], d))
    order: list[int | None] = [None] * dp
    next_place = 0
    for number, device in enumerate(holders):
        wanted = min(int(middle[device] * dp), dp - len(holders) + number)
        next_place = max(next_place, wanted)
        order[next_place] = device
        next_place += 1
    return tuple(_fill(order, [d for d in sorted(devices) if d not in middle], node_of))


def _fill(order: Sequence[int | None], rest: Sequence[int], node_of: Sequence[int]) -> list[int]:
    """Put the devices that hold nothing into the gaps, beside devices of their node."""
    by_node: dict[int, list[int]] = {}
    for device in reversed(rest):
        by_node.setdefault(node_of[device], []).append(device)
    filled: list[int] = []
    for holder in order:
        if holder is not None:
            filled.append(holder)
            continue
        node = node_of[filled[-1]] if filled else -1
        node = node if node in by_node else min(by_node)
        filled.append(by_node[node].pop())
        if not by_node[node]:
            del by_node[node]
    return filled
