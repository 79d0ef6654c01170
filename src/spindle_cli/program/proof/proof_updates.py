"""Part of the proof: parts of the parameters that are updated before all gradients are summed.

Which parts there are is not worked out once more; it is looked at whether each is what it should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from spindle_cli.account.sums import update_parts
from spindle_cli.program.proof.faults import fault
from spindle_cli.program.types import Action, Kind, Program


def check_updates(program: Program) -> None:
    """Each device updates parts early where the settings allow it, and nowhere else: behind all that it runs
    and posts, in the order of its sums, each part large enough and no larger than it has to be.

    Raises:
        ProgramError: naming the first device that does not.
    """
    own: dict[int, int] = {}
    for group in program.groups:
        if len(group.devices) == 1:
            own[group.devices[0]] = own.get(group.devices[0], 0) + group.num_bytes
    for device in program.actions:
        _check_order(program, device)
        _check_parts(program, device, own.get(device, 0))


def _check_order(program: Program, device: int) -> None:
    """UPDATEs are where they may be, just before STEP, and name groups that the device has summed by then,
    each once, in the order of sums.
    """
    settings = program.settings
    may_update = settings.by_parts and not (settings.clips or settings.scales or settings.sharded)
    summed: set[int] = set()
    last: Action | None = None
    for step, action in enumerate(program.actions[device]):
        place = (device, step)
        if last is not None and action.kind not in (Kind.UPDATE, Kind.STEP, Kind.GATHER):
            raise fault(program, f"device {device} updates a part before this", place)
        if action.kind is Kind.SUM and action.group is not None:
            summed.add(action.group)
        if action.kind is not Kind.UPDATE:
            continue
        if not may_update:
            raise fault(program, f"device {device} updates a part, which may not be yet", place)
        if action.group is not None and action.group not in summed:
            raise fault(program, f"device {device} has not started the sum of group {action.group}", place)
        if last is not None and _place(last) >= _place(action):
            raise fault(program, f"device {device} updates a part twice, or out of order", place)
        last = action


def _place(action: Action) -> int:
    """In the order of sums; what is summed with nobody comes first."""
    return -1 if action.group is None else action.group


def _check_parts(program: Program, device: int, own: int) -> None:
    settings = program.settings
    if not settings.by_parts or settings.clips or settings.scales or settings.sharded:
        return
    sizes = [(-1, own)] + [
        (group.index, group.num_bytes)
        for group in program.groups
        if device in group.devices and len(group.devices) > 1 and group.is_trained
    ]
    total = sum(size for _, size in sizes)
    updates = [(step, each) for step, each in enumerate(program.actions[device]) if each.kind is Kind.UPDATE]
    step = next(step for step, each in enumerate(program.actions[device]) if each.kind is Kind.STEP)
    for place, update in updates:
        cut = _place(update)
        part = [size for index, size in sizes if index <= cut]
        sizes = [each for each in sizes if each[0] > cut]
        if not _is_enough(sum(part), total) or _is_enough(sum(part[:-1]), total):
            raise fault(program, f"device {device} updates too little at once, or too much", (device, place))
    if updates and not _is_enough(sum(size for _, size in sizes), total):
        raise fault(program, f"device {device} leaves too little to STEP", (device, step))
    if _may_be_cut([size for _, size in sizes], total):
        raise fault(program, f"device {device} should update a part before STEP", (device, step))


def _is_enough(size: int, total: int) -> bool:
    """Whether some bytes are worth an update, of so many that the device updates in all."""
    return size >= update_parts.PART_BYTES and size * update_parts.MOST_PARTS >= total


def _may_be_cut(sizes: Sequence[int], total: int) -> bool:
    """Whether two parts could be made of neighbours."""
    left = sum(sizes)
    return any(
        _is_enough(before, total) and _is_enough(left - before, total) for before in accumulate(sizes[:-1])
    )
