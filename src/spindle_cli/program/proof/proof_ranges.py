"""Part of the proof: all devices that share something out cut it alike, and every one of them has a range."""

from __future__ import annotations

from spindle_cli.account.types import ParameterGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.program.proof.faults import fault
from spindle_cli.program.types import Program


def check_ranges(program: Program) -> None:
    """Weights are of groups that share state out, one of at least 1 for each device; a device has the same in
    all groups of these devices, as what is summed together lies in one flat tensor. Only unequal ranges are
    padded.

    Raises:
        ProgramError: naming the first group that does not fit.
    """
    weights_of: dict[tuple[int, ...], ParameterGroup] = {}
    for group in program.groups:
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
