"""Part of the proof: all devices that share something out cut it alike, every one of them has a range, and
what goes by nodes has communicators inside of them and between.
"""

from __future__ import annotations

from spindle_cli.account.types import ParameterGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.program.proof.faults import fault
from spindle_cli.program.proof.proof_moves import summing_communicators
from spindle_cli.program.types import Program


def check_ranges(program: Program) -> None:
    """Weights are of groups that share state out, one of at least 1 for each device; a device has the same in
    all groups of these devices, as what is summed together lies in one flat tensor. Only unequal ranges are
    padded. By nodes go equal ranges alone, with equally many devices on each.

    Raises:
        ProgramError: naming the first group that does not fit.
    """
    weights_of: dict[tuple[int, ...], ParameterGroup] = {}
    for group in program.groups:
        if group.nodes:
            _check_nodes(program, group)
        keeps_whole = group.is_gathered or group.sharding is Sharding.NONE
        if keeps_whole or len(group.devices) == 1:
            if len(set(group.weights)) > 1:
                raise fault(program, f"group {group.index} has weights, {group.weights}, and no ranges")
            continue
        if group.weights and (len(group.weights) != len(group.devices) or min(group.weights) < 1):
            message = f"group {group.index} is of devices {group.devices}, its weights are {group.weights}"
            raise fault(program, message)
        if not group.weights and (group.pads_sum or group.pads_gather):
            raise fault(program, f"group {group.index} is padded, and its ranges are equal")
        first = weights_of.setdefault(group.devices, group)
        if group.weights != first.weights:
            message = f"groups {first.index} and {group.index} are of the same devices, {group.devices}"
            raise fault(program, f"{message}; their weights are {first.weights} and {group.weights}")


def _check_nodes(program: Program, group: ParameterGroup) -> None:
    node_of = program.plan.cluster.node_of
    if tuple(sorted(device for node in group.nodes for device in node)) != group.devices:
        raise fault(program, f"group {group.index} is of devices {group.devices}, by nodes {group.nodes}")
    sizes = {len(node) for node in group.nodes}
    on_nodes = [{node_of[device] for device in node} for node in group.nodes]
    if len(sizes) != 1 or len(group.nodes) < 2 or any(len(found) > 1 for found in on_nodes):
        raise fault(program, f"group {group.index} does not go by nodes evenly: {group.nodes}")
    if group.weights or group.is_gathered or group.sharding is not Sharding.OPTIMIZER or group.teams:
        raise fault(program, f"group {group.index} goes by nodes, and is not summed once in equal ranges")
    summing = summing_communicators(program)
    missing = [part for part in (*group.nodes, *group.across) if part not in summing]
    if missing:
        raise fault(program, f"group {group.index} goes by nodes, and {missing[0]} have no communicator")
