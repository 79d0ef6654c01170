"""What all or some devices do together once in a step, with its bytes: sums, flags, norm and gathers."""

from __future__ import annotations

from collections.abc import Sequence

from spindle_cli.account.types import Collective, ParameterGroup, PlacedPlan, Together
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
    """All of a step: the losses, the sums in the order of their groups, each set of devices' flags, the norm,
    the gathers, which are those of the sums from the last to the first.

    Groups that are summed inside of each backward pass have no sum here, and those whose parameters are
    gathered inside of passes no gather.

    What a loss counts of labels or masks goes with the losses; a plan does not know how many numbers that is.

    Args:
        sharded: the devices of a sum share the optimizer's state.
        clips: gradients are clipped by their norm.
        scales: losses are scaled; whether a gradient has overflowed is summed with the norm.
    """
    everyone = tuple(range(plan.cluster.num_devices))
    num_tasks = len({metaop.task for metaop in plan.by_name.values()})
    numbers = num_tasks + 1 + NUMBERS_OF_A_RANK * len(everyone)
    found = [Together(Collective.LOSSES, everyone, NUMBER_BYTES * numbers, 2)]
    summed = [group for group in groups if len(group.devices) > 1]
    found += [
        Together(
            Collective.SUM,
            group.devices,
            *_moved(group, sharded=sharded),
            group.index,
            group.weights if sharded else (),
        )
        for group in summed
        if not group.sharding.is_by_pass
    ]
    if sharded:
        blocks: dict[tuple[int, ...], int] = {}
        for group in summed:
            if group.sharding is Sharding.NONE or not group.is_trained:
                continue
            blocks[group.devices] = blocks.get(group.devices, 0) + len(group.blocks)
        found += [
            Together(Collective.FLAGS, devices, FLAG_BYTES * count, 2) for devices, count in blocks.items()
        ]
    if clips or scales:
        found.append(Together(Collective.NORM, everyone, NUMBER_BYTES * (clips + scales), 2))
    if sharded:
        found += [
            Together(Collective.GATHER, group.devices, group.parameter_bytes, 1, group.index, group.weights)
            for group in reversed(summed)
            if group.sharding is not Sharding.NONE and not group.sharding.is_fetched
        ]
    return tuple(found)


def _moved(group: ParameterGroup, *, sharded: bool) -> tuple[int, int]:
    """The bytes of a group's sum, and how often they go around."""
    is_once = group.is_gathered or (sharded and group.sharding is not Sharding.NONE)
    return group.moved_bytes, 1 if is_once else 2
