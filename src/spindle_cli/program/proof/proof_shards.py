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
        replica_groups = _replica_groups_by_pass(program, device, sharded, reached)
        for step, action in enumerate(actions):
            wanted = sorted(replica_groups.get((action.kind, action.slice_index), ()))
            if _gathered_over(program, action) != wanted or len(action.shards) != len(wanted):
                message = f"expected what its parameters are gathered over, of {wanted}"
                if not sharded:
                    message = "nothing is shared out in this pass"
                raise fault(program, f"device {device}: {message}", (device, step))


def _check_users(program: Program, group: ParameterGroup) -> None:
    """Each slice that uses a sharded group runs on all of its devices, or on all of one of its replica groups
    and on nobody of another, so that they gather and sum at the same op; and that op is one of the slice's.
    """
    replica_groups = _replica_groups_of(program, group)
    for index, first, last in zip(group.slices, group.first_ops, group.last_ops, strict=True):
        begin, end = program.slices[index].ops
        holders = set(group.devices) & set(program.slices[index].devices)
        if holders not in map(set, replica_groups):
            message = f"slice {index} does not run on all devices that share its parameters out"
            raise fault(program, f"{message}, {' or '.join(map(str, replica_groups))}")
        if not begin <= first <= last < end:
            raise fault(program, f"group {group.index} is used by ops {first} to {last} of slice {index}")


def _replica_groups_by_pass(
    program: Program, device: int, sharded: Sequence[ParameterGroup], reached: Collection[int]
) -> dict[tuple[Kind, int | None], set[tuple[int, ...]]]:
    """For each pass of a device, the devices with which it gathers sharded parameters, or sums gradients,
    while it runs. `reached`: the slices to which gradients come.
    """
    replica_groups: dict[tuple[Kind, int | None], set[tuple[int, ...]]] = {}
    for group in sharded:
        replica_group = next(
            (
                replica_group
                for replica_group in group.replica_groups or (group.devices,)
                if device in replica_group
            ),
            None,
        )
        if replica_group is None:
            continue
        for index in group.slices:
            if device not in program.slices[index].devices:
                continue
            if index in reached:
                replica_groups.setdefault((Kind.BACKWARD, index), set()).add(replica_group)
            if group.sharding.is_fetched:
                replica_groups.setdefault((Kind.FORWARD, index), set()).add(replica_group)
    return replica_groups


def _gathered_over(program: Program, action: Action) -> list[tuple[int, ...]]:
    """The devices of the communicators that a pass names for what is sharded, ascending; what is no such
    communicator is left out.
    """
    all_indices = range(len(program.communicators))
    named = [program.communicators[index] for index in action.shards if index in all_indices]
    return sorted(communicator.ranks for communicator in named if communicator.purpose is Purpose.SHARDS)


def _replica_groups_of(program: Program, group: ParameterGroup) -> tuple[tuple[int, ...], ...]:
    """Who shares a group out.

    Raises:
        ProgramError: not each of its devices is in one replica group, or what is shared out is not gathered.
    """
    if not group.replica_groups:
        return (group.devices,)
    members = sorted(device for replica_group in group.replica_groups for device in replica_group)
    is_sound = tuple(members) == group.devices and min(map(len, group.replica_groups)) > 1 < len(
        group.replica_groups
    )
    if not (is_sound and group.sharding.is_fetched):
        message = f"group {group.index} ({group.sharding}) of devices {group.devices}"
        raise fault(program, f"{message} is not shared out by replica groups {group.replica_groups}")
    return group.replica_groups


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
