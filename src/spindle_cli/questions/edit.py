"""A profile with a task left out, or with another batch size of one, for what-if questions."""

from __future__ import annotations

from collections.abc import Sequence

from spindle_cli.errors import UsageError
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile, TaskShare


def edited(profile: Profile, without: Sequence[str], batches: Sequence[str]) -> Profile:
    """The profile without some tasks, then with other batch sizes ('task=size') of some.

    Raises:
        UsageError: there is no such task, or a batch size is not a number of at least 1.
    """
    for task in without:
        profile = without_task(profile, task)
    for text in batches:
        task, _, size = text.rpartition("=")
        if not (task and size.isdecimal()):
            raise UsageError(f"--batch {text}: expected TASK=SIZE, for example --batch image_text=64")
        profile = with_batch_size(profile, task, int(size))
    return profile


def without_task(profile: Profile, task: str) -> Profile:
    """The profile without one task's MetaOps; what it shared with others stays with them. Steps that ran no
    other task are left out.

    Raises:
        UsageError: there is no such task, or no other.
    """
    _check_task(profile, task)
    kept = tuple(metaop for metaop in profile.metaops if metaop.task != task)
    if not kept:
        raise UsageError(f"--without {task}: it is the only task of {profile.workload.name!r}")
    return _with_metaops(profile.model_copy(update={"task_sets": _sets_without(profile, task)}), kept)


def _sets_without(profile: Profile, task: str) -> tuple[TaskShare, ...]:
    """The sets of tasks that steps run, without one; none where every step then runs all that are left."""
    shares: dict[tuple[str, ...], float] = {}
    for each in profile.task_sets:
        tasks = tuple(name for name in each.tasks if name != task)
        if tasks:
            shares[tasks] = shares.get(tasks, 0.0) + each.share
    left = {metaop.task for metaop in profile.metaops} - {task}
    if [set(tasks) for tasks in shares] == [left]:
        return ()
    total = sum(shares.values())
    return tuple(TaskShare(tasks=tasks, share=share / total) for tasks, share in shares.items())


def with_batch_size(profile: Profile, task: str, batch_size: int) -> Profile:
    """The profile with another batch size of one task.

    An op's seconds depend on the samples per device: the curve is read as seconds against batch share and
    interpolated linearly between its points (beyond them along the nearest segment). Every new point's source
    is 'fitted'. A tensor-parallel degree has a curve of its own; an allocation is offered for every dp of the
    old curve's range that divides the new batch.

    Raises:
        UsageError: there is no such task, or the batch size is below 1.
    """
    _check_task(profile, task)
    if batch_size < 1:
        raise UsageError(f"--batch {task}={batch_size}: expected at least 1 sample")
    return _with_metaops(
        profile,
        tuple(
            _rebatched(metaop, batch_size) if metaop.task == task else metaop for metaop in profile.metaops
        ),
    )


def _check_task(profile: Profile, task: str) -> None:
    tasks = sorted({metaop.task for metaop in profile.metaops})
    if task not in tasks:
        raise UsageError(
            f"the profile of {profile.workload.name!r} has no task {task!r}",
            hint=f"Its tasks: {', '.join(tasks)}",
        )


def _with_metaops(profile: Profile, metaops: tuple[MetaOpProfile, ...]) -> Profile:
    data = profile.model_dump(by_alias=True) | {"metaops": [metaop.model_dump() for metaop in metaops]}
    return Profile.model_validate(data)


def _rebatched(metaop: MetaOpProfile, batch_size: int) -> MetaOpProfile:
    ratio = batch_size / metaop.batch_size
    points = [
        _point(metaop, same_tp, dp, batch_size)
        for same_tp in _by_tp(metaop.curve)
        for dp in range(1, max(point.dp for point in same_tp) + 1)
        if batch_size % dp == 0
    ]
    inner = metaop.inner_output_bytes
    return MetaOpProfile.model_validate(
        metaop.model_dump()
        | {
            "batch_size": batch_size,
            "activation_bytes_per_op": round(metaop.activation_bytes_per_op * ratio),
            "memory": [entry.rebatched(ratio).model_dump() for entry in metaop.memory],
            "field_bytes": {op: round(size * ratio) for op, size in metaop.field_bytes.items()},
            "output_bytes": round(metaop.output_bytes * ratio),
            "matrices": [each.rebatched(ratio).model_dump() for each in metaop.matrices],
            "inner_output_bytes": None if inner is None else round(inner * ratio),
            "flops_per_op": None if metaop.flops_per_op is None else metaop.flops_per_op * ratio,
            "fit": None,
            "curve": sorted(
                (point.model_dump() for point in points), key=lambda p: (p["num_devices"], p["tp"])
            ),
        }
    )


def _by_tp(curve: Sequence[CurvePoint]) -> list[list[CurvePoint]]:
    return [[point for point in curve if point.tp == tp] for tp in sorted({point.tp for point in curve})]


def _point(metaop: MetaOpProfile, curve: Sequence[CurvePoint], dp: int, batch_size: int) -> CurvePoint:
    """The new curve's point at `dp` shares, from the old points of one tensor-parallel degree."""
    share = batch_size / dp
    old_shares = [metaop.batch_size / point.dp for point in curve]
    tp = curve[0].tp
    return CurvePoint(
        num_devices=dp * tp,
        dp=dp,
        tp=tp,
        forward_s=_read_at(old_shares, [point.forward_s for point in curve], share),
        backward_s=_read_at(old_shares, [point.backward_s for point in curve], share),
        communication_s=_read_at(old_shares, [point.communication_s for point in curve], share),
        source="fitted",
    )


def _read_at(shares: Sequence[float], seconds: Sequence[float], share: float) -> float:
    """Seconds at a batch share, linear between the known ones; a single known one is scaled."""
    known = sorted(zip(shares, seconds, strict=True))
    if len(known) == 1:
        return known[0][1] * share / known[0][0]
    upper = next((i for i, (x, _) in enumerate(known) if x >= share), len(known) - 1)
    upper = max(upper, 1)
    (x0, y0), (x1, y1) = known[upper - 1], known[upper]
    at = y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    # Below the smallest known share an op is not faster than the line through zero, nor negative.
    return max(at, 0.0) if share >= known[0][0] else max(at, y0 * share / x0)
