"""When devices have updated their parameters, where each begins with what is complete first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from spindle_cli.account.step_end import own_bytes, update_parts
from spindle_cli.account.types import ParameterGroup


class SumEnd(NamedTuple):
    """When the sum of a group is predicted to end."""

    group: ParameterGroup
    end_s: float


class Kinds(NamedTuple):
    """Devices that take part in the same collectives are of one kind.

    `of_device`: of each. `taking_part`: of the devices of a collective, their kinds, and numbers of what else
    it occupies.
    """

    of_device: Sequence[int]
    taking_part: Mapping[tuple[int, ...], Sequence[int]]


def updated_s(
    groups: Iterable[ParameterGroup],
    passed_s: Sequence[float],
    sums_s: Sequence[SumEnd],
    steps_s: Sequence[float],
    kinds: Kinds,
) -> list[float]:
    """When each device has updated all its parameters.

    A part is updated when the one before it is, and when the last of its sums has ended.

    Args:
        groups: all, also those of which no sum is taken.
        passed_s: of each device, when its passes are through, and it knows the losses.
        sums_s: of all sums, in their order.
        steps_s: of each device, what the optimizer's step takes without the products of gathered factors.
        kinds: of devices that take part in the same sums.
    """
    own = own_bytes(groups)
    sums_of: dict[int, list[SumEnd]] = {}
    for each in sums_s:
        for kind in kinds.taking_part[each.group.devices] if each.group.is_trained else ():
            sums_of.setdefault(kind, []).append(each)
    known: dict[tuple[int, int, float, float], float] = {}  # of devices that do the same
    found: list[float] = []
    for device, (at_s, step_s) in enumerate(zip(passed_s, steps_s, strict=True)):
        key = (kinds.of_device[device], own.get(device, 0), at_s, step_s)
        if key not in known:
            known[key] = _updated_s(key[1], sums_of.get(key[0], ()), at_s, step_s)
        found.append(known[key])
    return found


def _updated_s(own: int, sums_s: Sequence[SumEnd], at_s: float, step_s: float) -> float:
    end_of = {group.index: end_s for group, end_s in sums_s}
    for part in update_parts(own, [group for group, _ in sums_s]):
        at_s = max([at_s, *(end_of[index] for index in part.groups)]) + part.seconds(step_s)
    return at_s
