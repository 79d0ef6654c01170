"""Small programs that hang, or might, and how to make them of programs that do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.program.link import link
from spindle_cli.program.types import Action, Kind, Program


def changed(program: Program, device: int, change: Callable[[list[Action]], object]) -> Program:
    actions = list(program.actions[device])
    change(actions)
    return replace(program, actions={**program.actions, device: tuple(actions)})


def step_of(program: Program, device: int, *kinds: Kind) -> int:
    return next(step for step, action in enumerate(program.actions[device]) if action.kind in kinds)


def move(first: int, second: int) -> Callable[[list[Action]], None]:
    return lambda actions: actions.insert(second, actions.pop(first))


def chain() -> Program:
    """Slice 0 on device 0 hands to slice 1 on device 1."""
    net = metaop_of("task/net", 2, {1: 1.0})
    waves = [[slice_of(net, (0, 1), (0,), 0.0)], [slice_of(net, (1, 2), (1,), 1.0)]]
    return link(plan_of(profile_of(net), cluster_of(2), waves))


def with_early_receive(program: Program) -> Program:
    """Device 0 posts the receive of its gradient before the sum of the losses."""
    losses, receive = (step_of(program, 0, kind) for kind in (Kind.LOSSES, Kind.RECV_GRAD))
    return changed(program, 0, move(receive, losses))


def over_one_communicator(program: Program) -> Program:
    """The same, with all transfers over the communicator of everyone."""
    actions = {
        device: tuple(
            action if action.transfer is None else replace(action, communicator=0) for action in own
        )
        for device, own in program.actions.items()
    }
    return replace(program, actions=actions)


def cycle() -> Program:
    """Three chains, 0 -> 1, 1 -> 2 and 2 -> 0: each device hands on what it has made, and takes the next
    one's.
    """
    nets = [metaop_of(f"task{number}/net", 2, {1: 1.0}) for number in range(3)]
    waves = [
        [slice_of(net, (0, 1), (number,), 0.0) for number, net in enumerate(nets)],
        [slice_of(net, (1, 2), ((number + 1) % 3,), 1.0) for number, net in enumerate(nets)],
    ]
    return link(plan_of(profile_of(*nets), cluster_of(3), waves))


def with_receives_ahead(program: Program) -> Program:
    """Every device of the cycle receives before all else, so that no first message is left to be sent."""
    for device in range(3):
        program = changed(program, device, move(step_of(program, device, Kind.RECV), 0))
    return program
