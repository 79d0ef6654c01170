"""How long each device computes in an iteration by the times that its plan was made from.

A slice lasts as long as the slowest of its shares, and a plan has times of slices. A device itself computes
its own shares alone, on its own type; where it is a processor that communicates and reads samples too, with
what that takes of it.
"""

from __future__ import annotations

from spindle_cli.account.processor import beside_slices, costs_nothing
from spindle_cli.account.traffic import Traffic
from spindle_cli.costs.beyond_curve import BeyondCurve
from spindle_cli.costs.offload import stalls_of_share
from spindle_cli.costs.recomputing import forwards_again
from spindle_cli.costs.shares.times import times_of, times_of_share
from spindle_cli.plan.types import Plan, Slice


def compute_of_devices(plan: Plan, traffic: Traffic) -> tuple[float, ...]:
    """Seconds that each device computes for one batch of every task, forward and backward, on average over
    the batches of a step.

    Args:
        plan: one that passes `check`.
        traffic: what it moves.
    """
    seconds = [0.0] * plan.cluster.num_devices
    beyond = BeyondCurve(plan.by_name, plan.cluster, plan)
    for piece in plan.slices:
        for share, share_s in enumerate(_shares_s(plan, piece, beyond)):
            for device in piece.devices[share * piece.tp : (share + 1) * piece.tp]:
                seconds[device] += share_s
    if costs_nothing(plan.processor):
        return tuple(seconds)
    beside = beside_slices(
        plan.processor,
        plan.cluster.num_devices,
        plan.slices,
        plan.by_name,
        traffic.messages(),
        traffic.collectives,
        plan.accumulate,
    )
    return tuple(own_s + other_s for own_s, other_s in zip(seconds, beside.seconds, strict=True))


def _shares_s(plan: Plan, piece: Slice, beyond: BeyondCurve) -> list[float]:
    """Of all ops of a slice, by its shares: both passes, what is computed again, and what comes on top.

    Of unequal shares on devices of one type a plan need know the largest alone; one that it does not know
    counts as that.
    """
    metaop, found = plan.by_name[piece.metaop], []
    for share in range(piece.dp):
        op = times_of_share(metaop, piece, share, plan.cluster) or times_of(metaop, piece, plan.cluster)
        assert op is not None, "`check` has seen to it"
        again_s = op.forward_s * forwards_again(piece, metaop) / piece.num_ops
        more_s = beyond.op_s(piece, metaop, op.forward_s, op.backward_s + again_s)
        waits = stalls_of_share(piece, metaop, plan.cluster, share, op)
        own_s = piece.num_ops * (op.forward_s + op.backward_s + again_s + sum(more_s))
        found.append(own_s + waits.forward_s + waits.backward_s)
    return found
