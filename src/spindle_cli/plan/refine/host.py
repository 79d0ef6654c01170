"""What slices move to host memory from forward to backward, in compiled loops: as `costs/` has it.

Of a slice whose option moves any, those of as many ops as hide behind what all of them compute, as evenly
apart as can be; the last op of a slice keeps its own (`spread_over`).
"""

from __future__ import annotations

from spindle_cli.plan.compiled import compiled
from spindle_cli.plan.refine.tables import Records, Tables


@compiled
def count_moved(tables: Tables, slice_: Records) -> int:
    """Count the ops of a slice whose activations are moved."""
    return int(tables.options[slice_.option].moved * (slice_.last - 1 - slice_.first) + 1e-9)


@compiled
def moved_op(slice_: Records, count: int, number: int) -> int:
    """Which op of a slice is a number of those that are moved; -1: there is none of that number."""
    if not 0 <= number < count:
        return -1
    return int(slice_.first + number * (slice_.last - 1 - slice_.first) // count)


@compiled
def moving_s(tables: Tables, slice_: Records) -> tuple[float, float]:
    """By how much both passes of a slice are longer than those of all its ops, or shorter: what is moved does
    not run again, and passes wait for copies, until the last share is through.
    """
    count, option = count_moved(tables, slice_), tables.options[slice_.option]
    num_ops = slice_.last - slice_.first
    if not count:
        return 0.0, 0.0
    alone_s, alone_back_s = num_ops * option.forward_s, num_ops * option.backward_s - count * option.again_s
    forward_s, backward_s = alone_s, alone_back_s
    for of_type in range(option.type_from, option.type_from + tables.common[0].types):
        if tables.of_types[of_type].devices:
            forward_s = max(forward_s, _forward_s(tables, slice_, count, tables.of_types[of_type]))
            backward_s = max(backward_s, _backward_s(tables, slice_, count, tables.of_types[of_type]))
    return forward_s - alone_s, backward_s - alone_back_s - option.again_s * count


@compiled
def _forward_s(tables: Tables, slice_: Records, count: int, share: Records) -> float:
    """Seconds of a forward pass: an op starts when at most one copy is under way."""
    now_s, before_s, last_s, number = 0.0, 0.0, 0.0, 0
    for op in range(slice_.first, slice_.last):
        now_s = max(now_s, before_s) + share.forward_s
        if op == moved_op(slice_, count, number):
            number += 1
            before_s = last_s
            last_s = max(now_s, last_s) + tables.op_bytes[share.bytes_from + op].copy_s
    return max(now_s, last_s)


@compiled
def _backward_s(tables: Tables, slice_: Records, count: int, share: Records) -> float:
    """Seconds of a backward pass: copies come back one after another, that of the last op from the start, and
    another one when the op behind it, of those that are moved, is through; of a neighbour, when that begins.
    """
    again_s, now_s, number = tables.options[slice_.option].again_s, 0.0, count - 1
    back_s = tables.op_bytes[share.bytes_from + moved_op(slice_, count, number)].copy_s
    for op in range(slice_.last - 1, slice_.first - 1, -1):
        if op != moved_op(slice_, count, number):
            now_s += share.backward_s + again_s
            continue
        start_s = max(now_s, back_s)
        now_s = start_s + share.backward_s
        number -= 1
        if number >= 0:
            following = moved_op(slice_, count, number)
            back_s = start_s if following == op - 1 else now_s
            back_s += tables.op_bytes[share.bytes_from + following].copy_s
    return now_s
