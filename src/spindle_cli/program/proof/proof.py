"""Prove that a program does what its plan says and always comes to its end, before anything starts.

Shares with `link` the types and the layouts only: edges, rows and orders are worked out here a second
time.

1. computes: every slice forward and backward once on each of its devices, then the step
2. sums: each has all its devices, in one order everywhere
3. sources: nothing is sent or summed before it is computed
4. communicators: everything goes over one that is made for it, in one order on all of its devices, and
   nothing is left out                                                      (proof_communicators.py)
5. rows: shares lie where the plan says, and each device gets every sample of every input, and of every
   gradient, once                                                           (proof_rows.py)
6. updates: what is updated before STEP may be, and is complete
7. what is given up has been sent before, and not been given up
8. a run to the end: nothing waits for ever, whatever the library     (proof_moves.py, proof_run.py)

Which parts of the parameters are updated before STEP is not worked out once more; it is looked at whether
each is what it should be.

Of a program of forward passes alone it is proved that each runs once, takes what was computed, and that all
end; its edges and rows are those of the whole program, which is proved by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise

from spindle_cli.account import step_end
from spindle_cli.program.proof.faults import fault
from spindle_cli.program.proof.proof_communicators import check_communicators
from spindle_cli.program.proof.proof_moves import early_ops, place_of
from spindle_cli.program.proof.proof_rows import check_rows, needed_edges
from spindle_cli.program.proof.proof_run import check_run
from spindle_cli.program.types import COMPUTES, SENDS, Action, Kind, Program, StepSettings, Transfer


def prove(program: Program) -> None:
    """Check a whole program; takes time in proportion to its actions.

    Raises:
        ProgramError: what is wrong, with the actions around it as a grid of devices by steps, the place
            marked.
    """
    check_computes(program)
    check_sums(program)
    check_sources(program)
    check_communicators(program)
    check_rows(program)
    check_updates(program)
    check_given_up(program)
    check_run(program)


def check_computes(program: Program) -> None:
    """Each device runs its own slices once forward and once backward, and ends with its one STEP, just before
    it NORM if there is one, and behind it GATHERs alone.

    Raises:
        ProgramError: naming the first device that does not.
    """
    check_passes(program)
    for device, actions in program.actions.items():
        steps = [step for step, action in enumerate(actions) if action.kind is Kind.STEP]
        last = max((step for step, action in enumerate(actions) if action.kind is not Kind.GATHER), default=0)
        if steps != [last]:
            raise fault(
                program, f"device {device}: expected one STEP, and only GATHERs behind it", (device, last)
            )
        for step in (step for step, action in enumerate(actions) if action.kind is Kind.NORM):
            if step != last - 1:
                raise fault(program, f"device {device}: expected NORM just before STEP", (device, step))


def check_sums(program: Program) -> None:
    """All devices of a group, and no others, start its sum once, in the order of groups, and no earlier than
    with the op that completes it.

    Raises:
        ProgramError: naming the first device that does not.
    """
    members: dict[int, list[int]] = {group.index: [] for group in program.groups}
    for device, actions in program.actions.items():
        sums = [(step, action) for step, action in enumerate(actions) if action.kind is Kind.SUM]
        _check_ops(program, device)
        for (_, earlier), (step, later) in pairwise(sums):
            if _group(earlier) >= _group(later):
                raise fault(program, f"device {device} starts its sums out of order", (device, step))
        for _, action in sums:
            members[_group(action)].append(device)
    for group in program.groups:
        is_summed = len(group.devices) > 1 and not group.sharding.is_by_pass
        is_summed = is_summed or (len(group.replica_groups) > 1 and group.is_trained)
        wanted = sorted(group.devices) if is_summed else []
        if sorted(members[group.index]) != wanted:
            device = min(set(wanted) ^ set(members[group.index]))
            message = f"device {device} starts SUM {group.index}, or should and does not"
            raise fault(program, message, (device, len(program.actions[device]) - 1))


def _check_ops(program: Program, device: int) -> None:
    """A sum's op is of the backward slice before it. Neither with it, nor with a sum behind it, which would
    take it along, may it start before the last op that adds to it there. What replica groups sum that the
    pass itself has summed starts behind that pass, and so do all sums that follow.
    """
    slice_index: int | None = None
    is_behind = False
    early = early_ops(program, device)
    for step, action in enumerate(program.actions[device]):
        if action.kind is Kind.BACKWARD:
            slice_index, is_behind = action.slice_index, False
        elif action.kind is Kind.SUM:
            group = program.groups[_group(action)]
            is_behind = is_behind or (bool(group.replica_groups) and action.op is None)
            if action.op is None and (slice_index is None or is_behind):
                continue  # the device has run nothing that adds to it, or the pass is through
            if is_behind or (group.replica_groups and slice_index in group.slices):
                raise fault(program, f"device {device} may start this sum inside of a pass", (device, step))
            if (
                slice_index is None
                or action.op is None
                or action.op not in range(*program.slices[slice_index].ops)
            ):
                raise fault(program, f"device {device}: expected an op of the slice before", (device, step))
            first_op = dict(zip(group.slices, group.first_ops, strict=True)).get(slice_index, action.op)
            if early[step] > first_op:
                message = f"device {device} may start this sum before op {first_op}, which adds to it"
                raise fault(program, message, (device, step))


def check_given_up(program: Program) -> None:
    """What a device gives up before a pass is what it has sent and has not given up.

    Raises:
        ProgramError: naming the first device that does not.
    """
    for device, actions in program.actions.items():
        sent: set[int] = set()
        for step, action in enumerate(actions):
            if action.kind in SENDS and action.transfer is not None:
                sent.add(action.transfer.key)
            if not sent.issuperset(action.left):
                message = f"device {device} gives up before this what it has not sent"
                raise fault(program, message, (device, step))
            sent.difference_update(action.left)


def _group(action: Action) -> int:
    assert action.group is not None, "a SUM has a group"
    return action.group


def check_sources(program: Program) -> None:
    """Each send comes after the compute that makes its data, each sum after all that the device adds to it,
    that of the losses after all forward passes.

    Raises:
        ProgramError: naming the first that does not.
    """
    for device, actions in program.actions.items():
        backward_slices = {action.slice_index for action in actions if action.kind is Kind.BACKWARD}
        done: set[tuple[Kind, int | None]] = set()
        for step, action in enumerate(actions):
            if action.kind in COMPUTES:
                done.add((action.kind, action.slice_index))
            for kind, index in _sources(program, action, backward_slices):
                if (kind, index) not in done:
                    raise fault(program, f"device {device} needs {kind} {index} before this", (device, step))


def _sources(
    program: Program, action: Action, backward_slices: Collection[int | None]
) -> list[tuple[Kind, int | None]]:
    """The passes of the device that make what a post sends or sums. `backward_slices`: all that the device
    runs backward.
    """
    if action.kind is Kind.SEND and action.transfer is not None:
        return [(Kind.FORWARD, action.transfer.producer)]
    if action.kind is Kind.SEND_GRAD and action.transfer is not None:
        return [(Kind.BACKWARD, action.transfer.consumer)]
    if action.kind is Kind.LOSSES:
        return [(Kind.FORWARD, index) for index in backward_slices]
    if action.kind is Kind.SUM:
        slices = program.groups[_group(action)].slices
        return [(Kind.BACKWARD, index) for index in slices if index in backward_slices]
    return []


_Step = tuple[int, Action]


def check_passes(program: Program) -> None:
    """Where the plan has one length for both passes, all forward and then all backward in reverse; else each
    forward before it is backward, in the order in which they are planned, and of two slices of one device the
    one that gives to the other first forward and last backward.

    Raises:
        ProgramError: naming the first device that does not.
    """
    slices_of: dict[int, set[int]] = {device: set() for device in program.actions}
    for index, slice_ in enumerate(program.slices):
        for device in slice_.devices:
            slices_of[device].add(index)
    is_mirrored = all(slice_.backward_s is None for slice_ in program.slices)
    takes: dict[int, list[int]] = {}
    for producer, consumer in needed_edges(program):
        takes.setdefault(consumer, []).append(producer)
    for device, actions in program.actions.items():
        computes = [(step, action) for step, action in enumerate(actions) if action.kind in COMPUTES]
        if is_mirrored:
            _check_mirrored(program, device, slices_of[device], computes)
        else:
            _check_in_order(program, device, slices_of[device], computes, takes)


def _check_mirrored(program: Program, device: int, slices: set[int], computes: Sequence[_Step]) -> None:
    expected = [Kind.FORWARD] * len(slices) + [Kind.BACKWARD] * len(slices)
    for (step, action), kind in zip(computes, expected, strict=False):
        if action.kind is not kind:
            raise fault(program, f"device {device}: expected {kind} here", (device, step))
    ran = [action.slice_index for _, action in computes]
    forward, backward = ran[: len(slices)], ran[len(slices) :]
    if Counter(forward) != Counter(slices):
        raise fault(program, f"device {device} does not run each of its slices forward once", (device, 0))
    if backward != forward[::-1]:
        raise fault(program, f"device {device}: backward does not mirror forward", (device, 0))


def _check_in_order(
    program: Program,
    device: int,
    slices: set[int],
    computes: Sequence[_Step],
    takes: Mapping[int, Sequence[int]],
) -> None:
    at = _steps_of_passes(program, device, slices, computes)
    first = [((Kind.FORWARD, index), (Kind.BACKWARD, index)) for index in sorted(slices)]
    for index in sorted(slices):
        for producer in slices.intersection(takes.get(index, ())):
            first.append(((Kind.FORWARD, producer), (Kind.FORWARD, index)))
            first.append(((Kind.BACKWARD, index), (Kind.BACKWARD, producer)))
    for (kind, index), then in first:
        if at[kind, index] > at[then]:
            raise fault(program, f"device {device} needs {kind} {index} before this", (device, at[then]))
    for (_, earlier), (step, later) in pairwise(computes):
        start_s, end_s = _times_s(program, later)
        planned_s, _ = _times_s(program, earlier)
        if start_s < planned_s and end_s <= planned_s:
            before = f"{earlier.kind} {earlier.slice_index}"
            message = f"device {device} runs this behind {before}, which is planned behind it"
            raise fault(program, message, (device, step))


def _steps_of_passes(
    program: Program, device: int, slices: set[int], computes: Sequence[_Step]
) -> dict[tuple[Kind, int], int]:
    """The step of each of a device's passes, of which it runs one forward and one backward for each of its
    slices.

    Raises:
        ProgramError: it runs one twice, one that is not its own, or leaves one out.
    """
    at: dict[tuple[Kind, int], int] = {}
    for step, action in computes:
        assert action.slice_index is not None, "an F or B has a slice"
        if action.slice_index not in slices or (action.kind, action.slice_index) in at:
            message = f"device {device}: expected each of its own slices once forward, once backward"
            raise fault(program, message, (device, step))
        at[action.kind, action.slice_index] = step
    for kind in COMPUTES:
        lost = [index for index in sorted(slices) if (kind, index) not in at]
        if lost:
            raise fault(program, f"device {device} does not run {kind} {lost[0]}", (device, 0))
    return at


def _times_s(program: Program, action: Action) -> tuple[float, float]:
    assert action.slice_index is not None, "an F or B has a slice"
    slice_ = program.slices[action.slice_index]
    if action.kind is Kind.BACKWARD and slice_.backward_s is not None:
        return slice_.backward_s
    return slice_.start_s, slice_.end_s


def check_updates(program: Program) -> None:
    """Each device updates parts early where the settings allow it, and nowhere else: behind all that it runs
    and posts, in the order of its sums, each part large enough and no larger than it has to be.

    Raises:
        ProgramError: naming the first device that does not.
    """
    local_bytes: dict[int, int] = {}
    for group in program.groups:
        if len(group.devices) == 1:
            local_bytes[group.devices[0]] = local_bytes.get(group.devices[0], 0) + group.num_bytes
    for device in program.actions:
        _check_order(program, device)
        _check_parts(program, device, local_bytes.get(device, 0))


def _check_order(program: Program, device: int) -> None:
    """UPDATEs are where they may be, just before STEP, and name groups that the device has summed by then,
    each once, in the order of sums.
    """
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
        if not _may_update_parts(program.settings):
            raise fault(program, f"device {device} updates a part, which may not be yet", place)
        if action.group is not None and action.group not in summed:
            raise fault(program, f"device {device} has not started the sum of group {action.group}", place)
        if last is not None and place_of(last) >= place_of(action):
            raise fault(program, f"device {device} updates a part twice, or out of order", place)
        last = action


def _may_update_parts(settings: StepSettings) -> bool:
    """Whether a part may be updated before all gradients are summed."""
    return settings.by_parts and not (settings.clips or settings.scales or settings.sharded)


def _check_parts(program: Program, device: int, local_bytes: int) -> None:
    """Where parts may be updated early, each has enough bytes and no more than it has to, and so has what is
    left to STEP. `local_bytes`: of parameters that no other device has.
    """
    if not _may_update_parts(program.settings):
        return
    sizes = {-1: local_bytes} | {
        group.index: group.num_bytes
        for group in program.groups
        if device in group.devices and len(group.devices) > 1 and group.is_trained
    }
    total = sum(sizes.values())
    actions = program.actions[device]
    updates = [step for step, action in enumerate(actions) if action.kind is Kind.UPDATE]
    for step in updates:
        last = place_of(actions[step])
        part = [sizes.pop(place) for place in tuple(sizes) if place <= last]
        if not _is_enough(sum(part), total) or _is_enough(sum(part[:-1]), total):
            raise fault(program, f"device {device} updates too little at once, or too much", (device, step))
    step = next(step for step, action in enumerate(actions) if action.kind is Kind.STEP)
    left = list(sizes.values())
    if updates and not _is_enough(sum(left), total):
        raise fault(program, f"device {device} leaves too little to STEP", (device, step))
    if _may_be_cut(left, total):
        raise fault(program, f"device {device} should update a part before STEP", (device, step))


def _is_enough(size: int, total: int) -> bool:
    """Whether some bytes are worth an update, of so many that the device updates in all."""
    return size >= step_end.PART_BYTES and size * step_end.MOST_PARTS >= total


def _may_be_cut(sizes: Sequence[int], total: int) -> bool:
    """Whether two parts could be made of neighbours."""
    left = sum(sizes)
    return any(
        _is_enough(before, total) and _is_enough(left - before, total) for before in accumulate(sizes[:-1])
    )


def prove_forward(forward: Program, whole: Program, task: str) -> None:
    """Check `forward` against the whole program that it is a part of.

    Raises:
        ProgramError: a slice of the task does not run once where it has to, a chunk that the whole program
            sends for it is not sent and received once, something is sent before it is computed or received
            after it is needed, or devices wait for ever.
    """
    for device, actions in forward.actions.items():
        wanted = {
            index
            for index, slice_ in enumerate(forward.slices)
            if device in slice_.devices and _task(forward, index) == task
        }
        _check_passes(forward, device, wanted)
        sent = {key for key in map(_key, actions) if key is not None}
        expected = {
            key
            for action in whole.actions[device]
            if (key := _key(action)) is not None and _is_handed_on(action, whole, task)
        }
        if sent != expected or len(sent) != sum(_key(action) is not None for action in actions):
            raise fault(forward, f"device {device} does not hand on what it has to", (device, 0))
        _check_forward_order(forward, device)
    check_run(forward)


def _check_passes(forward: Program, device: int, wanted: set[int]) -> None:
    passes = [action.slice_index for action in forward.actions[device] if action.kind is Kind.FORWARD]
    if sorted(index for index in passes if index is not None) != sorted(wanted):
        raise fault(forward, f"device {device} does not run each of its slices once", (device, 0))
    for step, action in enumerate(forward.actions[device]):
        if action.kind not in (Kind.FORWARD, Kind.SEND, Kind.RECV):
            raise fault(forward, f"device {device}: expected forward passes alone", (device, step))


def _check_forward_order(forward: Program, device: int) -> None:
    """What is sent was computed before, and what a pass takes is received before it."""
    ran: set[int] = set()
    for step, action in enumerate(forward.actions[device]):
        if action.kind is Kind.FORWARD and action.slice_index is not None:
            ran.add(action.slice_index)
            continue
        transfer = _transfer(action)
        if action.kind is Kind.SEND and transfer.producer not in ran:
            raise fault(forward, f"device {device} sends this before it is computed", (device, step))
        if action.kind is Kind.RECV and transfer.consumer in ran:
            raise fault(forward, f"device {device} receives this after it is needed", (device, step))


def _task(program: Program, index: int) -> str:
    return program.plan.by_name[program.slices[index].metaop].task


def _key(action: Action) -> tuple[Kind, int] | None:
    return None if action.transfer is None else (action.kind, action.transfer.key)


def _transfer(action: Action) -> Transfer:
    assert action.transfer is not None, "a message has a transfer"
    return action.transfer


def _is_handed_on(action: Action, program: Program, task: str) -> bool:
    transfer = _transfer(action)
    return not transfer.is_gradient and _task(program, transfer.producer) == task
