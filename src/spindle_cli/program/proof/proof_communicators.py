"""Part of the proof: what is communicated, over which communicator, in which order on all of its devices.

NCCL ignores tags, and lets a communicator's operations run in the order in which they were posted: two
devices that post them in different orders hang, or take one thing for another.

All devices that share something out cut it alike, every one of them has a range, and what goes by nodes
has communicators inside of them and between.

Messages have two communicators at most, and each device sends over one of them. Where connected devices
can be told in two halves so that none sends to its own, they are told so: none of these has what it sends
behind what it waits to receive, on one communicator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain, zip_longest

from spindle_cli.account.types import ParameterGroup, Purpose
from spindle_cli.files.sharding import Sharding
from spindle_cli.program.proof.faults import Place, fault
from spindle_cli.program.proof.proof_moves import Moves, summing_communicators
from spindle_cli.program.proof.proof_shards import check_shards, last_passes
from spindle_cli.program.types import RECEIVES, TRANSFERS, Action, Kind, Program, Transfer

_Posts = list[tuple[int, Action]]  # (step, action)
_PURPOSES = {
    **dict.fromkeys(TRANSFERS, (Purpose.MESSAGES,)),
    Kind.LOSSES: (Purpose.EVERYONE,),
    Kind.NORM: (Purpose.EVERYONE,),
    Kind.SUM: (Purpose.SUMS, Purpose.EVERYONE),
    Kind.FLAGS: (Purpose.SUMS, Purpose.EVERYONE),
    Kind.GATHER: (Purpose.SUMS, Purpose.EVERYONE),
    Kind.FORWARD: (Purpose.TENSOR, Purpose.STATISTICS),
    Kind.BACKWARD: (Purpose.TENSOR, Purpose.STATISTICS),
}


def check_communicators(program: Program) -> None:
    """Each action has the communicator of those who take part in it; all of them post the same over it, in
    one order; losses, flags, norm and gathers are there as the settings ask.

    Raises:
        ProgramError: naming the first that does not fit.
    """
    for index, communicator in enumerate(program.communicators):
        if communicator.index != index or list(communicator.ranks) != sorted(set(communicator.ranks)):
            raise fault(
                program, f"communicator {index} is numbered {communicator.index}, of {communicator.ranks}"
            )
    check_sides(program)
    check_ranges(program)
    check_shards(program)
    for device, actions in program.actions.items():
        for step, action in enumerate(actions):
            _check_action(program, device, step, action)
        _check_once_a_step(program, device)
    posts = _posts(program)
    for communicator in program.communicators:
        if communicator.purpose is Purpose.MESSAGES:
            _check_messages(program, posts[communicator.index])
        else:  # all devices take part in the same collectives, in one order
            ends = posts[communicator.index]
            _check_alike(program, ends, lambda action: (action.kind, action.slice_index, action.group))


def _check_action(program: Program, device: int, step: int, action: Action) -> None:
    place = (device, step)
    ranks = _takers(program, device, action)
    if action.communicator is None:
        if ranks is not None:
            raise fault(program, f"device {device} has no communicator for this", place)
        return
    if ranks is None or action.communicator not in range(len(program.communicators)):
        raise fault(
            program, f"device {device}: there is no communicator {action.communicator} for this", place
        )
    communicator = program.communicators[action.communicator]
    if action.transfer is None:
        fits = communicator.ranks == ranks
    else:
        fits = action.transfer.source in communicator.senders and set(ranks) <= set(communicator.ranks)
    if communicator.purpose not in _PURPOSES[action.kind] or not fits:
        message = f"communicator {communicator.index}, {communicator.purpose}, is not for this"
        raise fault(program, f"device {device}: {message}", place)
    if action.transfer is not None and not _own_end(device, action, action.transfer):
        raise fault(program, f"device {device} posts what is not its own", place)


def _takers(program: Program, device: int, action: Action) -> tuple[int, ...] | None:
    """Who takes part in what an action communicates; None: nothing is. Of FLAGS, whoever its communicator
    has.
    """
    if action.transfer is not None:
        return action.transfer.source, action.transfer.destination
    if action.slice_index is not None:
        return _partners(program, device, action.slice_index)
    if action.group is not None and action.kind is not Kind.UPDATE:
        return program.groups[action.group].devices
    if action.kind in (Kind.LOSSES, Kind.NORM):
        return tuple(sorted(program.actions))
    if action.kind is Kind.FLAGS and action.communicator in range(len(program.communicators)):
        assert action.communicator is not None, "it is in a range"
        return program.communicators[action.communicator].ranks
    return None


def _partners(program: Program, device: int, index: int) -> tuple[int, ...] | None:
    """Who sums something inside of a pass: all that run a share, where its batch norms take the statistics of
    the whole batch; those that hold the same share, where tensor parallelism splits it; else nobody.
    """
    layout, shape = program.layouts[index], program.slices[index]
    if program.plan.by_name[shape.metaop].batch_sums and shape.dp > 1:
        return tuple(sorted(shape.devices))
    return None if layout.tp == 1 else tuple(sorted(layout.holders(layout.share_of[device])))


def _own_end(device: int, action: Action, transfer: Transfer) -> bool:
    """Whether a post is the device's own end of a transfer of that phase, to another device."""
    sends = action.kind in (Kind.SEND, Kind.SEND_GRAD)
    gradient = action.kind in (Kind.SEND_GRAD, Kind.RECV_GRAD)
    end, peer = (transfer.source, transfer.destination) if sends else (transfer.destination, transfer.source)
    return end == device != peer and transfer.is_gradient == gradient


def _check_once_a_step(program: Program, device: int) -> None:
    """A device sums the losses once, and takes one NORM where gradients are clipped or losses scaled; where
    optimizer state is sharded, it exchanges flags and gathers parameters, else not.
    """
    actions = program.actions[device]
    checks_gradients = program.settings.clips or program.settings.scales
    for kind, wanted in ((Kind.LOSSES, 1), (Kind.NORM, int(checks_gradients))):
        count = sum(action.kind is kind for action in actions)
        if count != wanted:
            place = (device, len(actions) - 1)
            raise fault(program, f"device {device} has {count} {kind}, expected {wanted}", place)
    whole = {group.index for group in program.groups if group.sharding is Sharding.NONE}
    sums = [
        (step, action)
        for step, action in enumerate(actions)
        if action.kind is Kind.SUM and action.group not in whole
    ]
    _check_gathers(program, device, sums)
    _check_flags(program, device, sums)


def _check_gathers(program: Program, device: int, sums: _Posts) -> None:
    """Where optimizer state is sharded, a device gathers each group once whose gradients it sums, in passes
    or in one of `sums`: of groups that each device does not keep whole.
    """
    actions = program.actions[device]
    gathered = [action.group for action in actions if action.kind is Kind.GATHER]
    updated = [action.group for _, action in sums] + [
        group.index
        for group in program.groups
        if group.sharding is Sharding.GRADIENTS and device in group.devices
    ]
    if Counter(gathered) != Counter(updated if program.settings.sharded else ()):
        message = f"device {device} does not gather each group that it has summed once"
        raise fault(program, message, (device, len(actions) - 1))


def _check_flags(program: Program, device: int, sums: _Posts) -> None:
    """Where optimizer state is sharded, a device exchanges flags once over each communicator that it sums
    over, behind the last of these `sums` and behind the last pass that sums gradients of its devices.
    """
    actions = program.actions[device]
    flags = [(step, action.communicator) for step, action in enumerate(actions) if action.kind is Kind.FLAGS]
    last_sums = {action.communicator: step for step, action in sums}
    for index, step in last_passes(program, device).items():
        last_sums[index] = max(step, last_sums.get(index, step))
    wanted = list(last_sums) if program.settings.sharded else ()
    if Counter(communicator for _, communicator in flags) != Counter(wanted):
        message = f"device {device} does not exchange flags once over each communicator that it sums over"
        raise fault(program, message, (device, len(actions) - 1))
    for step, communicator in flags:
        if step < last_sums[communicator]:
            raise fault(program, f"device {device} exchanges flags before its last sum", (device, step))


def _posts(program: Program) -> list[dict[int, _Posts]]:
    """What each device posts, by communicator, in the order in which the runtime does."""
    posts: list[dict[int, _Posts]] = [
        {rank: [] for rank in communicator.ranks} for communicator in program.communicators
    ]
    moves = Moves(program)
    for device, actions in program.actions.items():
        for move in moves.of(device):
            if move.posts is not None:
                posts[move.communicator].setdefault(device, []).append((move.step, actions[move.step]))
    return posts


def _check_messages(program: Program, posts: dict[int, _Posts]) -> None:
    """Both ends of each pair of devices post the same transfers, sends against receives, in one order."""
    pairs: dict[tuple[int, int], dict[int, _Posts]] = {}
    for device, device_posts in posts.items():
        for step, action in device_posts:
            assert action.transfer is not None, "checked before"
            low, high = sorted((action.transfer.source, action.transfer.destination))
            pairs.setdefault((low, high), {low: [], high: []})[device].append((step, action))
    for ends in pairs.values():
        _check_alike(program, ends, lambda action: action.transfer)


def _check_alike(program: Program, ends: dict[int, _Posts], what: Callable[[Action], object]) -> None:
    """All devices post the same, as far as `what` tells, in one order."""
    (first, posts), *others = ends.items()
    for device, other_posts in others:
        for post, peer_post in zip_longest(posts, other_posts):
            if post is None or peer_post is None:
                alone, (step, _) = (device, peer_post) if post is None else (first, post)
                raise fault(program, f"device {alone} posts what its peer does not", (alone, step))
            if what(post[1]) != what(peer_post[1]):
                places: tuple[Place, ...] = ((first, post[0]), (device, peer_post[0]))
                message = f"devices {first} and {device} post in different orders over one communicator"
                raise fault(program, message, *places)


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
    if tuple(sorted(chain.from_iterable(group.nodes))) != group.devices:
        raise fault(program, f"group {group.index} is of devices {group.devices}, by nodes {group.nodes}")
    sizes = {len(node) for node in group.nodes}
    on_nodes = [{node_of[device] for device in node} for node in group.nodes]
    if len(sizes) != 1 or len(group.nodes) < 2 or any(len(node_indices) > 1 for node_indices in on_nodes):
        raise fault(program, f"group {group.index} does not go by nodes evenly: {group.nodes}")
    if group.weights or group.is_gathered or group.sharding is not Sharding.OPTIMIZER or group.replica_groups:
        raise fault(program, f"group {group.index} goes by nodes, and is not summed once in equal ranges")
    summing = summing_communicators(program)
    missing = [part for part in (*group.nodes, *group.across) if part not in summing]
    if missing:
        raise fault(program, f"group {group.index} goes by nodes, and {missing[0]} have no communicator")


MOST = 2


def check_sides(program: Program) -> None:
    """Check that messages between two halves of the devices can be told apart. For a plan that runs in turn
    with others this depends on what all of them send: there the halves are not looked at.

    Raises:
        ProgramError: naming the first communicator, or showing the first receive, that does not fit.
    """
    over: dict[int, int] = {}
    communicators = [
        communicator
        for communicator in program.communicators
        if communicator.senders or communicator.purpose is Purpose.MESSAGES
    ]
    for communicator in communicators:
        if (
            communicator.purpose is not Purpose.MESSAGES
            or not communicator.senders
            or len(communicators) > MOST
        ):
            kind = f"communicator {communicator.index}, {communicator.purpose}"
            raise fault(program, f"{kind}, is of senders {communicator.senders}")
        for sender in communicator.senders:
            if sender in over or sender not in communicator.ranks:
                raise fault(program, f"device {sender} does not send over one communicator that it is in")
            over[sender] = communicator.index
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
    first_receives: dict[tuple[int, int], Place] = {}
    for device, actions in program.actions.items():
        for step, action in enumerate(actions):
            if action.kind in RECEIVES and action.transfer is not None:
                transfer = action.transfer
                first_receives.setdefault((transfer.source, transfer.destination), (device, step))
    return first_receives


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
