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
    types = plan.cluster.types
    sizes_of = {"curve": "num_devices", "shares": "samples"}
    for metaop in plan.metaops:
        tables: dict[str, Sequence[CurvePoint | ShareTime]] = {"curve": metaop.curve, "shares": metaop.shares}
        for key, entries in tables.items():
            named = dict.fromkeys(entry.device for entry in entries)
            wrong = [each for each in named if plan.cluster.is_mixed and each not in types]
            if not plan.cluster.is_mixed and len(named) > 1:
                wrong = [each for each in named if each not in (None, types[0])]
            orders = [[_place(entry) for entry in entries if entry.device == each] for each in named]
            if wrong:
                yield Violation(
                    rule="types",
                    where=f"metaops, {metaop.name}.{key}",
                    value="an entry without `device`" if wrong[0] is None else f"an entry for {wrong[0]!r}",
                    expected=f"entries for the cluster's devices: {', '.join(types)}",
                )
            elif any(order != sorted(set(order)) for order in orders):
                yield Violation(
                    rule="types",
                    where=f"metaops, {metaop.name}.{key}",
                    value="entries in another order, or one twice",
                    expected=f"ascending {sizes_of[key]}, then tp, each once"
                    + (", of each type of device" if plan.cluster.is_mixed else ""),
                )


def _place(entry: CurvePoint | ShareTime) -> tuple[int, int]:
    return (entry.samples if isinstance(entry, ShareTime) else entry.num_devices), entry.tp


def valid_allocations(plan: Plan) -> Iterator[Violation]:
    """Find slices whose allocation nothing is known of. With equal shares, dp must divide the batch and the
    curve have a point for dp and tp; or dp divide the micro-batch and the time of its share be known; with
    `rows`, that of the largest.
    """
    for wave, piece in located(plan):
        metaop = plan.by_name[piece.metaop]
        where = place_of(wave, piece)
        if piece.rows is None and metaop.batch_size % piece.shares_of_batch:
            whole = "batch" if piece.micro_batches == 1 else "micro-batch"
            yield Violation(
                rule="allocation",
                where=where,
                value=f"dp {piece.dp}",
                expected=f"a divisor of the {whole} of {metaop.batch_size // piece.micro_batches} samples",
            )
        elif curve_point(metaop, piece, plan.cluster) is not None:
            continue
        elif plan.cluster.is_mixed:
            yield _not_known_on_all(plan.cluster, metaop, piece, where)
        elif piece.micro_batches > 1 or piece.rows is not None:
            known = [share.samples for share in metaop.shares if share.tp == piece.tp]
            reach = f"from {min(known)} to {max(known)} samples" if known else "none"
            yield Violation(
                rule="allocation",
                where=where,
                value=f"a share of {largest_samples(piece, metaop.batch_size):.0f} samples, tp {piece.tp}",
                expected=f"within the MetaOp's shares for tp {piece.tp}: {reach}",
            )
        else:
            points = ", ".join(f"{point.dp}x{point.tp}" for point in metaop.curve) or "none"
            yield Violation(
                rule="allocation",
                where=where,
                value=f"dp {piece.dp} x tp {piece.tp} has no point on the curve",
                expected=f"one of the curve's dp x tp: {points}",
            )


def selective_where_known(plan: Plan) -> Iterator[Violation]:
    """Find slices that recompute all but what takes longest where the profile does not know what that takes
    and saves, or where tensor parallelism splits the ops.
    """
    for wave, piece in located(plan):
        if piece.selective and (piece.tp > 1 or plan.by_name[piece.metaop].selective_share is None):
            yield Violation(
                rule="selective",
                where=place_of(wave, piece),
                value="selective: true" + (f" with tp {piece.tp}" if piece.tp > 1 else ""),
                expected="recompute alone: what takes longest may be kept with tp 1, where the MetaOp has a "
                "selective_share",
            )


def experts_for_all(plan: Plan) -> Iterator[Violation]:
    """Each device of a group that shares out experts has one at least."""
    for wave, piece in located(plan):
        count = plan.by_name[piece.metaop].num_experts
        if 0 < count < piece.tp:
            yield Violation(
                rule="experts",
                where=place_of(wave, piece),
                value=f"tp {piece.tp} for {count} experts: {piece.tp - count} devices would have none",
                expected=f"tp {count} at most",
            )


def _not_known_on_all(cluster: Cluster, metaop: PlanMetaOp, piece: Slice, where: str) -> Violation:
    """The first share of a slice whose time is not known on its devices' type."""
    equal = metaop.batch_size / piece.shares_of_batch
    samples = sizes(piece) or (equal,) * piece.dp
    for share, count in enumerate(samples):
        device = piece.devices[share * piece.tp]
        kind = cluster.type_of[device]
        if share_on_type(metaop, kind, count, piece.tp) is not None:
            continue
        known = [entry.samples for entry in metaop.shares if (entry.device, entry.tp) == (kind, piece.tp)]
        reach = f"from {min(known)} to {max(known)} samples" if known else "none"
        return Violation(
            rule="allocation",
            where=where,
            devices=(device,),
            value=f"share {share}, of {count:g} samples, tp {piece.tp}, on a {kind}",
            expected=f"within the MetaOp's shares for tp {piece.tp} on a {kind}: {reach}; or a point of its "
            "curve there",
        )
    raise AssertionError("the time of every share is known")


def curve_point(metaop: PlanMetaOp, piece: Slice, cluster: Cluster) -> tuple[float, float] | None:
    """(forward_s, backward_s) of one op on the longest share of the slice; None if that is not known."""
    op = times_of(metaop, piece, cluster)
    return None if op is None else op[:2]
