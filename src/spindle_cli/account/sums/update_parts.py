"""In which parts a device updates its parameters, where it may begin before all of its gradients are summed.

First what no other device holds, then its groups in the order of their sums. Neighbours are updated together
until they are worth a step of the optimizer: each one goes through the interpreter, and on a GPU starts
kernels of its own, of which little is to be left beside the part's own time. What is left to the last part is
at best one of so many of the whole step; more parts would save little more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spindle_cli.account.types import ParameterGroup, StepNumbers

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
        """Of its update, where that of all parts takes `step_s` without products."""
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
    found: dict[int, int] = {}
    for group in groups:
        if len(group.devices) == 1:
            found[group.devices[0]] = found.get(group.devices[0], 0) + group.num_bytes
    return found


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
    own = own_bytes(groups)
    found: dict[int, tuple[UpdatePart, ...]] = {}
    for device, last in ends.items():
        # What is summed with nobody comes first, so that an end is one more than the groups before it.
        numbers = [group.index for group in held[device]]
        places = [1 + sum(each is not None and number <= each for number in numbers) for each in last]
        found[device] = parts_until((*places, len(numbers) + 1), own.get(device, 0), held[device])
    return found
