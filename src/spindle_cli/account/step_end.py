"""The end of a step: what devices do together, with its bytes (sums, flags, norm and gathers), and in which
parts each device updates its parameters, where it may begin before all of its gradients are summed.

A device first updates what no other device holds, then its groups in the order of their sums. Neighbours are
updated together until they are worth a step of the optimizer: each one goes through the interpreter, and on a
GPU starts kernels of its own, of which little is to be left beside the part's own time. What is left to the
last part is at best one of so many of the whole step; more parts would save little more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from spindle_cli.account.types import Collective, ParameterGroup, PlacedPlan, StepNumbers, Together
from spindle_cli.costs.links import Spread
from spindle_cli.costs.parameters import parts_collective_s
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding

# Each loss, and the one more number by which a rank asks all to stop, is summed in float64; so is the norm,
# and whether a gradient has overflowed.
# With the losses goes what each rank says of itself: its memory, and how long it has waited for data.
NUMBER_BYTES = 8
NUMBERS_OF_A_RANK = 2
# What tells whether a parameter was reached.
FLAG_BYTES = 1


def collectives_of_step(
    plan: PlacedPlan, groups: Sequence[ParameterGroup], *, sharded: bool, clips: bool, scales: bool
) -> tuple[Together, ...]:
    """All collectives of a step: the losses, the sums in the order of their groups, each set of devices'
    flags, the norm, the gathers, which are those of the sums from the last to the first.

    Groups that are summed inside of each backward pass have no sum here, and those whose parameters are
    gathered inside of passes no gather, but what replica groups sum and hand on among each other.

    What a loss counts of labels or masks goes with the losses; a plan does not know how many numbers that is.

    Args:
        sharded: the devices of a sum share the optimizer's state.
        clips: gradients are clipped by their norm.
        scales: losses are scaled; whether a gradient has overflowed is summed with the norm.
    """
    everyone = tuple(range(plan.cluster.num_devices))
    num_tasks = len({metaop.task for metaop in plan.by_name.values()})
    numbers = num_tasks + 1 + NUMBERS_OF_A_RANK * len(everyone)
    collectives = [Together(Collective.LOSSES, everyone, NUMBER_BYTES * numbers, 2)]
    summed = [group for group in groups if len(group.devices) > 1]
    collectives += [
        Together(
            Collective.SUM,
            group.devices,
            *_moved(group, plan.cluster, sharded=sharded),
            group.index,
            group.weights if sharded and not group.replica_groups else (),
            by_node=sharded and bool(group.nodes) and not group.sums_whole,
        )
        for group in summed
        if group.is_summed_at_once
    ]
    if sharded:
        collectives += _flags(summed)
    if clips or scales:
        collectives.append(Together(Collective.NORM, everyone, NUMBER_BYTES * (clips + scales), 2))
    if sharded:
        collectives += [_handed_on(group, plan.cluster) for group in reversed(summed) if group.is_handed_on]
    return tuple(collectives)


def _flags(summed: Iterable[ParameterGroup]) -> Iterator[Together]:
    """Yield the collective of each set of devices that tells which parameters any of them has reached."""
    blocks: dict[tuple[int, ...], int] = {}
    for group in summed:
        if group.is_trained and group.sharding is not Sharding.NONE:
            blocks[group.devices] = blocks.get(group.devices, 0) + len(group.blocks)
    for devices, count in blocks.items():
        yield Together(Collective.FLAGS, devices, FLAG_BYTES * count, 2)


def together_s(collective: Together, spread: Spread, cluster: Cluster) -> float:
    """Seconds of a collective with nothing beside it. `spread`: of its devices."""
    return parts_collective_s(
        collective.num_bytes,
        spread,
        collective.rounds,
        cluster,
        collective.weights,
        by_node=collective.by_node,
    )


def _moved(group: ParameterGroup, cluster: Cluster, *, sharded: bool) -> tuple[int, int]:
    """The bytes of a group's sum, and how often they go around."""
    if group.replica_groups:
        return between_replica_groups_bytes(group, group.num_bytes, cluster), 1
    is_once = group.is_gathered or (sharded and group.sharding is not Sharding.NONE)
    return group.moved_bytes, 1 if is_once and not group.sums_whole else 2


def _handed_on(group: ParameterGroup, cluster: Cluster) -> Together:
    """The gather of what a group's devices have updated."""
    if not group.replica_groups:
        return Together(
            Collective.GATHER,
            group.devices,
            group.parameter_bytes,
            2 if group.gathers_whole else 1,
            group.index,
            group.weights,
            by_node=bool(group.nodes) and not group.gathers_whole,
        )
    num_bytes = between_replica_groups_bytes(group, group.parameter_bytes, cluster)
    return Together(Collective.GATHER, group.devices, num_bytes, 1, group.index)


def between_replica_groups_bytes(group: ParameterGroup, num_bytes: int, cluster: Cluster) -> int:
    """Bytes of a gather over all devices of a group that would load their links as its replica groups do with
    what they exchange: each device of T replica groups hands on, or takes, (T - 1) / T of its range, of the
    smallest replica group the largest; between nodes all devices of a node at once.

    A gather of b bytes over n devices moves (n - 1) / n of b into each node, or over each device's link where
    there is one node alone.

    Args:
        num_bytes: of what each replica group shares out.
    """
    count, num_devices = len(group.replica_groups), len(group.devices)
    on_node = Counter(cluster.node_of[device] for device in group.devices)
    at_once = max(on_node.values()) if len(on_node) > 1 else 1
    of_device = num_bytes / min(map(len, group.replica_groups)) * (count - 1) / count
    return ceil(at_once * of_device * num_devices / (num_devices - 1))


PART_BYTES = 4 * 2**20  # of gradients
MOST_PARTS = 8


@dataclass(frozen=True)
class UpdatePart:
    """What a device updates at a time; the first part has what no other device holds too.

    Attributes:
        groups: whose sums it waits for, in their order.
        share: of all bytes that the device updates.
        product_s: seconds that it takes to make gradients of gathered factors.
    """

    groups: tuple[int, ...]
    share: float
    product_s: float

    def seconds(self, step_s: float) -> float:
        """Seconds of its update, where that of all parts takes `step_s` without products."""
        return step_s * self.share + self.product_s


def updates_early(numbers: StepNumbers) -> bool:
    """Whether devices update some parameters before the sums of others have ended.

    Not where all gradients are judged first; nor where devices share optimizer state, as there the flags
    behind all sums tell which parameters have gradients.
    """
    waits = numbers.clips_gradients or numbers.scales_losses or numbers.optimizer_state_sharded
    return numbers.updates_by_parts and not waits


def update_parts(own_bytes: int, groups: Sequence[ParameterGroup]) -> tuple[UpdatePart, ...]:
    """The parts of a device.

    Args:
        own_bytes: of gradients that it sums with nobody.
        groups: those that it does sum, in the order of their sums.
    """
    sizes = [own_bytes, *(group.num_bytes for group in groups)]
    return parts_until(part_ends(sizes), own_bytes, groups)


def part_ends(sizes: Sequence[int]) -> tuple[int, ...]:
    """Cut neighbours of these bytes into parts, each as small as may be: how many of them are in the parts up
    to each one's end.
    """
    total = sum(sizes)
    least = max(PART_BYTES, -(-total // MOST_PARTS))
    ends: list[int] = []
    taken, before = 0, 0
    for place, size in enumerate(sizes, start=1):
        taken += size
        if taken - before >= least and total - taken >= least:
            ends.append(place)
            before = taken
    return (*ends, len(sizes))


def parts_until(
    ends: Iterable[int], own_bytes: int, groups: Sequence[ParameterGroup]
) -> tuple[UpdatePart, ...]:
    """The parts with these ends, as `part_ends` gives them for the device's own and its groups."""
    total = own_bytes + sum(group.num_bytes for group in groups)
    parts: list[UpdatePart] = []
    begin = 0
    for end in ends:
        held = groups[max(0, begin - 1) : end - 1]
        size = sum(group.num_bytes for group in held) + (own_bytes if begin == 0 else 0)
        parts.append(
            UpdatePart(
                groups=tuple(group.index for group in held),
                share=size / total if total else 1.0,
                product_s=sum(group.product_s for group in held),
            )
        )
        begin = end
    return tuple(parts)


def own_bytes(groups: Iterable[ParameterGroup]) -> dict[int, int]:
    """By device, bytes of the gradients that it sums with nobody, where there are any."""
    num_bytes: dict[int, int] = {}
    for group in groups:
        if len(group.devices) == 1:
            num_bytes[group.devices[0]] = num_bytes.get(group.devices[0], 0) + group.num_bytes
    return num_bytes


def parts_by_device(
    groups: Sequence[ParameterGroup], ends: Mapping[int, Sequence[int | None]]
) -> dict[int, tuple[UpdatePart, ...]]:
    """The parts of devices by where they end.

    Args:
        groups: of all devices, in the order of their sums.
        ends: by device, the group that each part but the last ends with; None: the part has none.
    """
    held: dict[int, list[ParameterGroup]] = {device: [] for device in ends}
    for group in groups:
        if len(group.devices) > 1 and group.is_trained:
            for device in group.devices:
                held[device].append(group)
    unshared = own_bytes(groups)
    parts: dict[int, tuple[UpdatePart, ...]] = {}
    for device, last in ends.items():
        # What is summed with nobody comes first, so that an end is one more than the groups before it.
        numbers = [group.index for group in held[device]]
        places = [1 + sum(end is not None and number <= end for number in numbers) for end in last]
        parts[device] = parts_until((*places, len(numbers) + 1), unshared.get(device, 0), held[device])
    return parts
