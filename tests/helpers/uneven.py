"""A plan in which one MetaOp runs in shares of unequal size."""

from __future__ import annotations

from collections.abc import Sequence

from helpers.plans import cluster_of, plan_of, profile_of, slice_of
from helpers.random_plans import plan_on
from spindle_cli.costs.shares import times_of
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import MetaOpProfile


def uneven_plan(
    metaop: MetaOpProfile,
    rows: Sequence[int],
    devices: Sequence[int] = (),
    tp: int = 1,
    micro_batches: int = 1,
) -> Plan:
    """All ops of a MetaOp in one slice, or one for each micro-batch, one behind the other; passes are as long
    as the largest share takes.
    """
    devices = tuple(devices) or tuple(range((len(rows) - 1) * tp))
    whole = slice_of(metaop, (0, metaop.num_ops), (0,), 0.0)
    cut = whole.model_copy(update={"devices": devices, "dp": len(rows) - 1, "tp": tp, "rows": tuple(rows)})
    op = times_of(metaop, cut, cluster_of(len(devices)))
    assert op is not None
    forward_s, backward_s = metaop.num_ops * op.forward_s, metaop.num_ops * op.backward_s
    slices = []
    for number in range(micro_batches):
        start_s = number * (forward_s + backward_s)
        times = {"start_s": start_s, "end_s": start_s + forward_s, "backward_start_s": start_s + forward_s}
        times["backward_end_s"] = start_s + forward_s + backward_s
        of = {"micro_batch": number, "micro_batches": micro_batches}
        slices.append(cut.model_copy(update=times | of))
    cluster = cluster_of(max(devices) + 1)
    like = plan_of(profile_of(metaop), cluster, [[whole]])
    counts = {metaop.task: micro_batches} if micro_batches > 1 else {}
    plan = plan_on(cluster, like.metaops, slices, counts)
    return plan.model_copy(update={"workload": like.workload, "profile": like.profile})
