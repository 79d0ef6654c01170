"""Rules about what slices take on their devices: allocations whose times are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spindle_cli.check.types import Violation, located, place_of
from spindle_cli.costs.shares import largest_samples, share_on_type, sizes, times_of
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.types import Plan, PlanMetaOp, Slice
from spindle_cli.profile.types import CurvePoint, ShareTime


def of_known_types(plan: Plan) -> Iterator[Violation]:
    """Points and shares of a cluster of several types each name one of these; on one of a single type they
    are all of that. They ascend, as times of sizes between two are found so.
    """
    for metaop in plan.metaops:
        where = f"metaops, {metaop.name}"
        yield from _table_of_known_types(plan.cluster, f"{where}.curve", metaop.curve, "num_devices")
        yield from _table_of_known_types(plan.cluster, f"{where}.shares", metaop.shares, "samples")


def _table_of_known_types(
    cluster: Cluster, where: str, entries: Sequence[CurvePoint | ShareTime], size: str
) -> Iterator[Violation]:
    """Find wrong types and a wrong order among the entries of a table, which ascend by the key `size`."""
    types = cluster.types
    named = list(dict.fromkeys(entry.device for entry in entries))
    wrong = _wrong_types(cluster, named)
    orders = [[_place(entry) for entry in entries if entry.device == type_] for type_ in named]
    if wrong:
        yield Violation(
            rule="types",
            where=where,
            value="an entry without `device`" if wrong[0] is None else f"an entry for {wrong[0]!r}",
            expected=f"entries for the cluster's devices: {', '.join(types)}",
        )
    elif any(order != sorted(set(order)) for order in orders):
        of_each_type = ", of each type of device" if cluster.is_mixed else ""
        yield Violation(
            rule="types",
            where=where,
            value="entries in another order, or one twice",
            expected=f"ascending {size}, then tp, each once{of_each_type}",
        )


def _wrong_types(cluster: Cluster, named: Sequence[str | None]) -> list[str | None]:
    """Which of the types that entries name a cluster does not have; on one of a single type, entries that all
    name one are of it, whatever they call it.
    """
    if cluster.is_mixed:
        return [type_ for type_ in named if type_ not in cluster.types]
    return [type_ for type_ in named if type_ not in (None, cluster.types[0])] if len(named) > 1 else []


def _place(entry: CurvePoint | ShareTime) -> tuple[int, int]:
    return (entry.samples if isinstance(entry, ShareTime) else entry.num_devices), entry.tp


def valid_allocations(plan: Plan) -> Iterator[Violation]:
    """Find slices whose allocation nothing is known of. With equal shares, dp must divide the batch and the
    curve have a point for dp and tp; or dp divide the micro-batch and the time of its share be known; with
    `rows`, that of the largest.
    """
    for wave, slice_ in located(plan):
        metaop = plan.by_name[slice_.metaop]
        where = place_of(wave, slice_)
        if slice_.rows is None and metaop.batch_size % slice_.shares_of_batch:
            whole = "batch" if slice_.micro_batches == 1 else "micro-batch"
            yield Violation(
                rule="allocation",
                where=where,
                value=f"dp {slice_.dp}",
                expected=f"a divisor of the {whole} of {metaop.batch_size // slice_.micro_batches} samples",
            )
        elif curve_point(metaop, slice_, plan.cluster) is not None:
            continue
        elif plan.cluster.is_mixed:
            yield _first_unknown_share(plan.cluster, metaop, slice_, where)
        elif slice_.micro_batches > 1 or slice_.rows is not None:
            measured_samples = [share.samples for share in metaop.shares if share.tp == slice_.tp]
            reach = (
                f"from {min(measured_samples)} to {max(measured_samples)} samples"
                if measured_samples
                else "none"
            )
            yield Violation(
                rule="allocation",
                where=where,
                value=f"a share of {largest_samples(slice_, metaop.batch_size):.0f} samples, tp {slice_.tp}",
                expected=f"within the MetaOp's shares for tp {slice_.tp}: {reach}",
            )
        else:
            points = ", ".join(f"{point.dp}x{point.tp}" for point in metaop.curve) or "none"
            yield Violation(
                rule="allocation",
                where=where,
                value=f"dp {slice_.dp} x tp {slice_.tp} has no point on the curve",
                expected=f"one of the curve's dp x tp: {points}",
            )


def selective_where_known(plan: Plan) -> Iterator[Violation]:
    """Find slices that recompute all but what takes longest where the profile does not know what that takes
    and saves, or where tensor parallelism splits the ops.
    """
    for wave, slice_ in located(plan):
        if slice_.selective and (slice_.tp > 1 or plan.by_name[slice_.metaop].selective_share is None):
            yield Violation(
                rule="selective",
                where=place_of(wave, slice_),
                value="selective: true" + (f" with tp {slice_.tp}" if slice_.tp > 1 else ""),
                expected="recompute alone: what takes longest may be kept with tp 1, where the MetaOp has a "
                "selective_share",
            )


def experts_for_all(plan: Plan) -> Iterator[Violation]:
    """Each device of a group that shares out experts has one at least."""
    for wave, slice_ in located(plan):
        count = plan.by_name[slice_.metaop].num_experts
        if 0 < count < slice_.tp:
            yield Violation(
                rule="experts",
                where=place_of(wave, slice_),
                value=f"tp {slice_.tp} for {count} experts: {slice_.tp - count} devices would have none",
                expected=f"tp {count} at most",
            )


def _first_unknown_share(cluster: Cluster, metaop: PlanMetaOp, slice_: Slice, where: str) -> Violation:
    """The first share of a slice whose time is not known on its devices' type."""
    equal = metaop.batch_size / slice_.shares_of_batch
    samples = sizes(slice_) or (equal,) * slice_.dp
    for share, count in enumerate(samples):
        device = slice_.devices[share * slice_.tp]
        kind = cluster.type_of[device]
        if share_on_type(metaop, kind, count, slice_.tp) is not None:
            continue
        measured_samples = [
            entry.samples for entry in metaop.shares if (entry.device, entry.tp) == (kind, slice_.tp)
        ]
        reach = (
            f"from {min(measured_samples)} to {max(measured_samples)} samples" if measured_samples else "none"
        )
        return Violation(
            rule="allocation",
            where=where,
            devices=(device,),
            value=f"share {share}, of {count:g} samples, tp {slice_.tp}, on a {kind}",
            expected=f"within the MetaOp's shares for tp {slice_.tp} on a {kind}: {reach}; or a point of its "
            "curve there",
        )
    raise AssertionError("the time of every share is known")


def curve_point(metaop: PlanMetaOp, slice_: Slice, cluster: Cluster) -> tuple[float, float] | None:
    """(forward_s, backward_s) of one op on the longest share of the slice; None if that is not known."""
    op = times_of(metaop, slice_, cluster)
    return None if op is None else op[:2]
