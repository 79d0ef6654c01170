"""Part of the proof: what is gathered and summed inside of passes, where devices share parameters or
gradients out.
"""

from __future__ import annotations

from spindle_cli.account.types import ParameterGroup, Purpose
from spindle_cli.program.proof.faults import fault
from spindle_cli.program.types import Kind, Program


def check_shards(program: Program) -> None:
    """Every pass that uses what is shared out has the communicators for it, and no others: a forward pass of
    parameters, a backward pass to which gradients come of gradients too. All devices of such a group run each
    of its slices, or all of one of its teams and nobody of another, so that they gather and sum at the same
    op.

    Raises:
        ProgramError: naming the first that does not fit.
    """
    shared_out = [group for group in program.groups if group.sharding.is_by_pass]
    for group in shared_out:
        teams = _teams_of(program, group)
        for slice_index, first, last in zip(group.slices, group.first_ops, group.last_ops, strict=True):
            begin, end = program.slices[slice_index].ops
            holders = set(group.devices) & set(program.slices[slice_index].devices)
            if holders not in map(set, teams):
                message = f"slice {slice_index} does not run on all devices that share its parameters out"
                raise fault(program, f"{message}, {' or '.join(map(str, teams))}")
            if not begin <= first <= last < end:
                raise fault(
                    program, f"group {group.index} is used by ops {first} to {last} of slice {slice_index}"
                )
    if not shared_out:
        _check_none(program)
        return
    backward = _with_gradients(program)
    for device, actions in program.actions.items():
        used_in: dict[tuple[Kind, int | None], set[tuple[int, ...]]] = {}
        for group in (group for group in shared_out if device in group.devices):
            team = next(team for team in group.teams or (group.devices,) if device in team)
            for slice_index in (
                slice_index for slice_index in group.slices if device in program.slices[slice_index].devices
            ):
                if slice_index in backward:
                    used_in.setdefault((Kind.BACKWARD, slice_index), set()).add(team)
                if group.sharding.is_fetched:
                    used_in.setdefault((Kind.FORWARD, slice_index), set()).add(team)
        for step, action in enumerate(actions):
            wanted = sorted(used_in.get((action.kind, action.slice_index), ()))
            there = [index for index in action.shards if index in range(len(program.communicators))]
            ranks = sorted(
                program.communicators[index].ranks
                for index in there
                if program.communicators[index].purpose is Purpose.SHARDS
            )
            if ranks != wanted or len(action.shards) != len(wanted):
                message = f"device {device}: expected what its parameters are gathered over, of {wanted}"
                raise fault(program, message, (device, step))


def _teams_of(program: Program, group: ParameterGroup) -> tuple[tuple[int, ...], ...]:
    """Who shares a group out.

    Raises:
        ProgramError: not each of its devices is in one team, or what is shared out is not gathered.
    """
    if not group.teams:
        return (group.devices,)
    members = sorted(device for team in group.teams for device in team)
    is_sound = tuple(members) == group.devices and min(map(len, group.teams)) > 1 < len(group.teams)
    if not (is_sound and group.sharding.is_fetched):
        message = f"group {group.index} ({group.sharding}) of devices {group.devices}"
        raise fault(program, f"{message} is not shared out by teams {group.teams}")
    return group.teams


def _with_gradients(program: Program) -> set[int]:
    """The slices that train something, and all that take what these make, from slice to slice."""
    reached: set[int] = set()
    coming = [index for group in program.groups if group.is_trained for index in group.slices]
    while coming:
        index = coming.pop()
        if index not in reached:
            reached.add(index)
            coming += [edge.consumer for edge in program.edges if edge.producer == index]
    return reached


def _check_none(program: Program) -> None:
    for device, actions in program.actions.items():
        for step, action in enumerate(actions):
            if action.shards:
                raise fault(program, f"device {device}: nothing is shared out in this pass", (device, step))


def last_passes(program: Program, device: int) -> dict[int, int]:
    """By the communicator that flags go over, the step of the last backward pass that sums gradients which
    its devices share out.
    """
    slices: dict[tuple[int, ...], set[int]] = {}
    for group in program.groups:
        if group.sharding.is_by_pass and group.is_trained and device in group.devices:
            slices.setdefault(group.devices, set()).update(group.slices)
    if not slices:
        return {}
    at = {
        action.slice_index: step
        for step, action in enumerate(program.actions[device])
        if action.kind is Kind.BACKWARD
    }
    return {
        communicator.index: max(at[index] for index in slices[communicator.ranks] if index in at)
        for communicator in program.communicators
        if communicator.purpose in (Purpose.SUMS, Purpose.EVERYONE) and communicator.ranks in slices
    }
