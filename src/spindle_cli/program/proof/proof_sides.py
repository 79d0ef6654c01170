"""Part of the proof: the communicators of messages. There are two at most, and each device sends over one of
them. Where connected devices can be told in two halves so that none sends to its own, they are told so: none
of these has what it sends behind what it waits to receive, on one communicator.
"""

from __future__ import annotations

from spindle_cli.account.types import Purpose
from spindle_cli.program.proof.faults import Place, fault
from spindle_cli.program.types import RECEIVES, Program

MOST = 2


def check_sides(program: Program) -> None:
    """Check that messages between two halves of the devices can be told apart. For a plan that runs in turn
    with others this depends on what all of them send: there the halves are not looked at.

    Raises:
        ProgramError: naming the first communicator, or showing the first receive, that does not fit.
    """
    over: dict[int, int] = {}
    found = [each for each in program.communicators if each.senders or each.purpose is Purpose.MESSAGES]
    for each in found:
        if each.purpose is not Purpose.MESSAGES or not each.senders or len(found) > MOST:
            raise fault(program, f"communicator {each.index}, {each.purpose}, is of senders {each.senders}")
        for sender in each.senders:
            if sender in over or sender not in each.ranks:
                raise fault(program, f"device {sender} does not send over one communicator that it is in")
            over[sender] = each.index
    if program.plan.joint is None:
        _check_apart(program, over)


def _check_apart(program: Program, over: dict[int, int]) -> None:
    received = _received(program)
    peers: dict[int, set[int]] = {}
    for source, destination in received:
        peers.setdefault(source, set()).add(destination)
        peers.setdefault(destination, set()).add(source)
    can_be = _in_halves(peers)
    for (source, destination), place in received.items():
        if source in can_be and source in over and over[source] == over.get(destination):
            message = f"devices {source} and {destination} both send over communicator {over[source]}"
            raise fault(program, message, place)


def _received(program: Program) -> dict[tuple[int, int], Place]:
    """By (source, destination) of messages, where the first of them is received."""
    found: dict[tuple[int, int], Place] = {}
    for device, actions in program.actions.items():
        for step, action in enumerate(actions):
            if action.kind in RECEIVES and action.transfer is not None:
                transfer = action.transfer
                found.setdefault((transfer.source, transfer.destination), (device, step))
    return found


def _in_halves(peers: dict[int, set[int]]) -> set[int]:
    """The devices of all connected parts without a cycle of odd length."""
    can_be: set[int] = set()
    far: dict[int, int] = {}  # steps away from where a part was begun, along one way
    for start in peers:
        if start in far:
            continue
        far[start] = 0
        part = [start]
        for device in part:
            for peer in peers[device]:
                if peer not in far:
                    far[peer] = far[device] + 1
                    part.append(peer)
        if all((far[device] - far[peer]) % 2 for device in part for peer in peers[device]):
            can_be.update(part)
    return can_be
