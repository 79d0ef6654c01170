"""Part of the proof: shares are those of the plan, and each device gets every sample of every input, and of
every gradient, exactly once; or its part of them, where the devices that hold the same share get the others.
"""

from __future__ import annotations

from spindle_cli.account.activations import WHOLE, Layout
from spindle_cli.program.proof.faults import fault
from spindle_cli.program.types import Kind, Program

# Samples [first, last) that each device receives, and which part of them.
_Spans = dict[int, list[tuple[int, int, tuple[int, int]]]]
_Direction = tuple[int, int, bool]  # (producer, consumer, is_gradient)


def check_rows(program: Program) -> None:
    """Check that each device of every slice has the samples that the plan gives it. For each edge that the
    MetaGraph asks for, in both directions: what a device holds itself and what it receives make up its rows,
    without gap or overlap; and whoever sends holds what it sends.

    Raises:
        ProgramError: naming the device, the compute, and what it gets.
    """
    for index in range(len(program.slices)):
        _check_shares(program, index)
    received = _received(program)
    for producer, consumer in needed_edges(program):
        layouts = program.layouts[producer], program.layouts[consumer]
        for is_gradient, (origin, target) in ((False, layouts), (True, layouts[::-1])):
            spans = received.pop((producer, consumer, is_gradient), {})
            if spans or origin != target:
                _check_direction(program, (producer, consumer, is_gradient), origin, target, spans)
    for (producer, consumer, _), spans in received.items():
        device = min(spans)
        message = f"device {device} receives slice {producer}'s output for slice {consumer}, which takes none"
        raise fault(program, message, (device, _step_of(program, device, Kind.FORWARD, consumer)))


def _check_shares(program: Program, index: int) -> None:
    """The shares of a slice follow each other from the beginning of its micro-batch to its end, and lie where
    the plan says.
    """
    slice_, layout = program.slices[index], program.layouts[index]
    size = program.plan.by_name[slice_.metaop].batch_size // slice_.micro_batches
    begin = slice_.micro_batch * size
    ends = slice_.rows or [share * size // slice_.dp for share in range(slice_.dp + 1)]
    if len(ends) != slice_.dp + 1 or ends[0] != 0 or ends[-1] != size or sorted(set(ends)) != list(ends):
        message = f"the shares of {slice_.label}, {list(ends)}, do not make up its {size} samples"
        raise fault(program, message, (slice_.devices[0], 0))
    for position, device in enumerate(slice_.devices):
        share = position // slice_.tp
        planned = begin + ends[share], begin + ends[share + 1]
        if layout.rows_of(device) != planned:
            rows = layout.rows_of(device)
            message = f"device {device} has samples {rows} of {slice_.label}, is to have {planned}"
            raise fault(program, message, (device, _step_of(program, device, Kind.FORWARD, index)))


def needed_edges(program: Program) -> list[tuple[int, int]]:
    """(producer, consumer) slices that the plan's MetaGraph asks for, in each micro-batch."""
    holder: dict[tuple[str, int, int], int] = {}  # the slice whose last op comes just before this one
    for index, slice_ in enumerate(program.slices):
        holder[slice_.metaop, slice_.micro_batch, slice_.ops[1]] = index
    needed: list[tuple[int, int]] = []
    for index, slice_ in enumerate(program.slices):
        metaop = program.plan.by_name[slice_.metaop]
        if slice_.ops[0] > 0:
            needed.append((holder[slice_.metaop, slice_.micro_batch, slice_.ops[0]], index))
        names = metaop.inputs if slice_.ops[0] == 0 else metaop.inputs_of_every_op
        needed.extend(
            (holder[name, slice_.micro_batch, program.plan.by_name[name].num_ops], index) for name in names
        )
    return needed


def _received(program: Program) -> dict[_Direction, _Spans]:
    received: dict[_Direction, _Spans] = {}
    for device, actions in program.actions.items():
        for step, action in enumerate(actions):
            transfer = action.transfer
            if transfer is None or action.kind not in (Kind.RECV, Kind.RECV_GRAD):
                continue
            origin = program.layouts[transfer.consumer if transfer.is_gradient else transfer.producer]
            if not _holds(origin, transfer.source, transfer.first, transfer.last):
                message = f"device {transfer.source} sends samples that it does not hold"
                raise fault(program, message, (device, step))
            direction = (transfer.producer, transfer.consumer, transfer.is_gradient)
            spans = received.setdefault(direction, {}).setdefault(device, [])
            spans.append((transfer.first, transfer.last, transfer.part))
    return received


def _holds(layout: Layout, device: int, first: int, last: int) -> bool:
    if device not in layout.share_of:
        return False
    low, high = layout.rows_of(device)
    return low <= first < last <= high


def _check_direction(
    program: Program, direction: _Direction, origin: Layout, target: Layout, received: _Spans
) -> None:
    producer, consumer, is_gradient = direction
    kind, compute = (Kind.BACKWARD, producer) if is_gradient else (Kind.FORWARD, consumer)
    for device in sorted({*target.devices, *received}):
        if device not in target.share_of:
            message = f"device {device} receives for {kind} {compute}, which it does not run"
            raise fault(program, message, (device, 0))
        first, last = target.rows_of(device)
        spans = [(low, high) for low, high, _ in received.get(device, ())]
        if device in origin.share_of:
            low, high = origin.rows_of(device)
            if max(low, first) < min(high, last):
                spans.append((max(low, first), min(high, last)))
        spans.sort()
        if not _tiles(spans, first, last):
            message = f"device {device} needs samples {first}:{last} once for {kind} {compute}, gets {spans}"
            raise fault(program, message, (device, _step_of(program, device, kind, compute)))
    _check_in_parts(program, (kind, compute), target, received)


def _check_in_parts(program: Program, pass_: tuple[Kind, int], target: Layout, received: _Spans) -> None:
    """Check that devices that hold one share, and gather it when the pass begins from the parts that they are
    sent, each receive a part of their own, of the same samples as the others.
    """
    kind, compute = pass_
    for share in range(target.dp):
        holders = sorted(target.holders(share))
        in_parts = [_gathered(received, device, place, target.tp) for place, device in enumerate(holders)]
        if None in in_parts or in_parts.count(in_parts[0]) < len(in_parts):
            message = f"devices {holders} do not get all parts of what they gather for {kind} {compute}"
            raise fault(
                program, message, *((holder, _step_of(program, holder, kind, compute)) for holder in holders)
            )


def _gathered(received: _Spans, device: int, place: int, count: int) -> list[tuple[int, int]] | None:
    """The spans that a device, the one at `place` of so many, receives its part of; None where it receives
    another one's.
    """
    spans = [(low, high, part) for low, high, part in received.get(device, ()) if part != WHOLE]
    if any(part != (place, count) for *_, part in spans):
        return None
    return sorted((low, high) for low, high, _ in spans)


def _tiles(spans: list[tuple[int, int]], first: int, last: int) -> bool:
    """Whether sorted spans cover [first, last) without gap or overlap."""
    for low, high in spans:
        if low != first:
            return False
        first = high
    return first == last


def _step_of(program: Program, device: int, kind: Kind, index: int) -> int:
    for step, action in enumerate(program.actions[device]):
        if action.kind is kind and action.slice_index == index:
            return step
    return 0
