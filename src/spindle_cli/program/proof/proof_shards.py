"""Part of the proof: what is gathered and summed inside of passes, where devices share parameters or
gradients out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from spindle_cli.account.types import ParameterGroup, Purpose
from spindle_cli.program.proof.faults import fault
from spindle_cli.program.types import Action, Kind, Program


def check_shards(program: Program) -> None:
    """Check that every pass that uses sharded parameters names the communicators for them, and no others: a
    forward pass those of parameters, a backward pass to which gradients come those of gradients too.

    Raises:
        ProgramError: naming the first that does not fit.
    """
    sharded = [group for group in program.groups if group.sharding.is_by_pass]
    for group in sharded:
        _check_users(program, group)
    reached = _with_gradients(program)
    for device, actions in program.actions.items():
        teams = _teams_by_pass(program, device, sharded, reached)
        for step, action in enumerate(actions):
            wanted = sorted(teams.get((action.kind, action.slice_index), ()))
            if _gathered_over(program, action) != wanted or len(action.shards) != len(wanted):
                message = f"expected what its parameters are gathered over, of {wanted}"
                if not sharded:
                    message = "nothing is shared out in this pass"
                raise fault(program, f"device {device}: {message}", (device, step))


def _check_users(program: Program, group: ParameterGroup) -> None:
    """Each slice that uses a sharded group runs on all of its devices, or on all of one of its teams and on
    nobody of another, so that they gather and sum at the same op; and that op is one of the slice's.
    """
    teams = _teams_of(program, group)
    for index, first, last in zip(group.slices, group.first_ops, group.last_ops, strict=True):
        begin, end = program.slices[index].ops
        holders = set(group.devices) & set(program.slices[index].devices)
        if holders not in map(set, teams):
            message = f"slice {index} does not run on all devices that share its parameters out"
            raise fault(program, f"{message}, {' or '.join(map(str, teams))}")
        if not begin <= first <= last < end:
            raise fault(program, f"group {group.index} is used by ops {first} to {last} of slice {index}")


def _teams_by_pass(
    program: Program, device: int, sharded: Sequence[ParameterGroup], reached: Collection[int]
) -> dict[tuple[Kind, int | None], set[tuple[int, ...]]]:
    """For each pass of a device, the devices with which it gathers sharded parameters, or sums gradients,
    while it runs. `reached`: the slices to which gradients come.
    """
    teams: dict[tuple[Kind, int | None], set[tuple[int, ...]]] = {}
    for group in sharded:
        team = next((team for team in group.teams or (group.devices,) if device in team), None)
        if team is None:
            continue
        for index in group.slices:
            if device not in program.slices[index].devices:
                continue
            if index in reached:
                teams.setdefault((Kind.BACKWARD, index), set()).add(team)
            if group.sharding.is_fetched:
                teams.setdefault((Kind.FORWARD, index), set()).add(team)
    return teams


def _gathered_over(program: Program, action: Action) -> list[tuple[int, ...]]:
    """The devices of the communicators that a pass names for what is sharded, ascending; what is no such
    communicator is left out.
    """
    all_indices = range(len(program.communicators))
    named = [program.communicators[index] for index in action.shards if index in all_indices]
    return sorted(communicator.ranks for communicator in named if communicator.purpose is Purpose.SHARDS)


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
