"""Rules between a plan and the profile that it was made from."""

from __future__ import annotations

from collections.abc import Iterator

from spindle_cli.check.types import RELATIVE_SLACK, Violation, exact_s
from spindle_cli.costs.shares import OpSeconds, share_on_type, share_seconds
from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan, PlanMetaOp
from spindle_cli.profile.metagraph import topological_order
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile, ShareTime


def require_same_workload(plan: Plan, profile: Profile) -> None:
    """Refuse a profile of another workload.

    Raises:
        InputError: the fingerprints differ.
    """
    if plan.workload.fingerprint != profile.workload.fingerprint:
        raise InputError(
            f"the profile is of workload {profile.workload.name!r} ({profile.workload.fingerprint}); "
            f"the plan is for {plan.workload.name!r} ({plan.workload.fingerprint})",
            hint="Give the profile that the plan was made from, or plan again with this one.",
        )


def same_profile(plan: Plan, profile: Profile) -> Iterator[Violation]:
    """The plan was made from exactly this profile."""
    sha256 = profile.sha256()
    if plan.profile.sha256 != sha256:
        yield Violation(
            rule="profile",
            where="profile.sha256",
            value=plan.profile.sha256,
            expected=f"{sha256}, this profile's; has it been measured again since?",
        )


def same_metaops(plan: Plan, profile: Profile) -> Iterator[Violation]:
    """The plan's MetaOps are the profile's, key by key; its curve points are points of the profile's."""
    for name in sorted(set(profile.by_name) ^ set(plan.by_name)):
        missing = name in profile.by_name
        yield Violation(
            rule="metaops",
            where=f"metaops, {name}",
            value="missing from the plan" if missing else "not in the profile",
            expected="the same MetaOps in both",
        )
    for metaop in plan.metaops:
        source = profile.by_name.get(metaop.name)
        if source is not None:
            yield from _same_keys(metaop, source)
            yield from _same_points(metaop, source)
            yield from _same_shares(metaop, source)
            yield from _same_matrices(metaop, source)


def _same_keys(metaop: PlanMetaOp, source: MetaOpProfile) -> Iterator[Violation]:
    for key in sorted(
        (set(PlanMetaOp.model_fields) & set(MetaOpProfile.model_fields)) - {"curve", "shares", "gathered"}
    ):
        said, meant = getattr(metaop, key), getattr(source, key)
        if said != meant:
            yield Violation(
                rule="metaops",
                where=f"metaops, {metaop.name}.{key}",
                value=_short(said),
                expected=f"{_short(meant)}, as in the profile",
            )


def _same_matrices(metaop: PlanMetaOp, source: MetaOpProfile) -> Iterator[Violation]:
    """What is gathered is what the profile says may be."""
    for place, matrix in enumerate(metaop.gathered):
        if matrix.model_copy(update={"flops_per_s": None}) not in source.matrices:
            yield Violation(
                rule="gathered",
                where=f"metaops, {metaop.name}.gathered[{place}]",
                value=f"{matrix.parameter!r} of op {matrix.op} by {matrix.way}",
                expected="one of the profile's matrices of this MetaOp, with its sizes",
            )


def _same_points(metaop: PlanMetaOp, source: MetaOpProfile) -> Iterator[Violation]:
    profile_points = {(point.device, point.dp, point.tp): point for point in source.curve}
    for point in metaop.curve:
        meant = profile_points.get((point.device, point.dp, point.tp))
        if meant is None or not _equal_times(point, meant):
            yield Violation(
                rule="curve",
                where=f"metaops, {metaop.name}.curve",
                value=f"dp {point.dp} x tp {point.tp}{_on(point)} takes {exact_s(point.op_s)} per op",
                expected="no such point" if meant is None else f"{exact_s(meant.op_s)}, as in the profile",
            )


def _same_shares(metaop: PlanMetaOp, source: MetaOpProfile) -> Iterator[Violation]:
    for share in metaop.shares:
        meant = (
            share_seconds(source.shares, share.samples, share.tp)
            if share.device is None
            else share_on_type(source, share.device, share.samples, share.tp)
        )
        if meant is None or not _equal_times(share, meant):
            yield Violation(
                rule="curve",
                where=f"metaops, {metaop.name}.shares",
                value=f"{share.samples} samples, tp {share.tp}{_on(share)}, take "
                f"{exact_s(share.forward_s + share.backward_s)} per op",
                expected="no such share"
                if meant is None
                else f"{exact_s(meant.forward_s + meant.backward_s)}, as in the profile",
            )


def _equal_times(said: CurvePoint | ShareTime, meant: CurvePoint | OpSeconds) -> bool:
    slack_s = RELATIVE_SLACK * (meant.forward_s + meant.backward_s)
    return (
        abs(said.forward_s - meant.forward_s) <= slack_s
        and abs(said.backward_s - meant.backward_s) <= slack_s
    )


def _on(entry: CurvePoint | ShareTime) -> str:
    return "" if entry.device is None else f" on a {entry.device}"


def bound_is_no_guess(plan: Plan, profile: Profile) -> Iterator[Violation]:
    """lower_bound_s is at least what two bounds that need no linear program give.

    Work: the devices' seconds at each MetaOp's most economical allocation, over all devices. Path: the
    longest chain of MetaOps, each at its fastest. The linear program's optimum is never below either.
    """
    if plan.cluster.is_mixed:
        return  # a slice over several types may be faster than every point of the curves
    num_devices = plan.cluster.num_devices
    usable = {
        metaop.name: [point for point in metaop.curve if point.num_devices <= num_devices]
        for metaop in profile.metaops
    }
    if not all(usable.values()):
        return  # some MetaOp has no allocation on this cluster; its slices are reported as such
    work_s = sum(
        metaop.num_ops * min(point.num_devices * point.op_s for point in usable[metaop.name])
        for metaop in profile.metaops
    )
    longest_s: dict[str, float] = {}
    for name in topological_order(profile.metaops):
        metaop = profile.by_name[name]
        before_s = max((longest_s[producer] for producer in metaop.inputs), default=0.0)
        longest_s[name] = before_s + metaop.num_ops * min(point.op_s for point in usable[name])
    at_least_s = max(work_s / num_devices, *longest_s.values())
    if plan.predicted.lower_bound_s < at_least_s * (1 - RELATIVE_SLACK):
        yield Violation(
            rule="lower-bound",
            where="predicted.lower_bound_s",
            value=exact_s(plan.predicted.lower_bound_s),
            expected=f"at least {exact_s(at_least_s)}, which the work or the longest chain alone takes",
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
