"""Of random plans: after calibrating, the planner's formulas say what was measured, whatever the plan."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.made_runs import made_run
from helpers.examples import examples
from helpers.random_plans import plans
from spindle_cli.calibrate.predicting import predicted_again
from spindle_cli.calibrate.run import calibrate
from spindle_cli.costs.shares import OpSeconds, times_of
from spindle_cli.plan.types import Plan
from spindle_cli.profile.points import CurvePoint, OfDevice
from spindle_cli.profile.types import Device, MetaOpProfile, ProcessorCosts, Profile

NO_COSTS = ProcessorCosts()
COSTS = ProcessorCosts(message_s=1e-4, s_per_byte=1e-9, load_s={"task": 1e-3, "a": 2e-3, "b": 5e-4})


def profile_behind(plan: Plan, costs: ProcessorCosts) -> Profile:
    """A profile that a plan may be made from, with the points that it uses."""
    names = set(MetaOpProfile.model_fields)
    metaops = tuple(
        MetaOpProfile(
            **{name: getattr(each, name) for name in type(each).model_fields if name in names},
        )
        for each in plan.metaops
    )
    device = Device(type="a800-80gb", name="a800-80gb", memory_bytes=80 * 2**30)
    training = {**plan.training, "processor": costs}
    return Profile(workload=plan.workload, device=device, metaops=metaops, **training)


def without_inner_shares(profile: Profile) -> Profile:
    """Which says of shares between two others of their `tp` what lies between these."""

    def outer(metaop: MetaOpProfile) -> MetaOpProfile:
        sizes: dict[int, list[int]] = {}
        for share in metaop.shares:
            sizes.setdefault(share.tp, []).append(share.samples)
        ends = {(end(own), tp) for tp, own in sizes.items() for end in (min, max)}
        kept = tuple(share for share in metaop.shares if (share.samples, share.tp) in ends)
        return metaop.model_copy(update={"shares": kept})

    fields = {name: getattr(profile, name) for name in Profile.model_fields}
    return Profile(**{**fields, "metaops": tuple(map(outer, profile.metaops))})


Times = list[tuple[float, float]]


def by_share(profile: Profile, times: Times) -> Profile:
    """A profile of which each MetaOp, on each size of a share and `tp`, takes one of these times as long."""

    def longer(number: int, batch_size: int, entry: OfDevice) -> OfDevice:
        samples = batch_size // entry.dp if isinstance(entry, CurvePoint) else entry.samples
        forward, backward = times[(7 * number + samples + 3 * entry.tp) % len(times)]
        seconds = {"forward_s": entry.forward_s * forward, "backward_s": entry.backward_s * backward}
        return entry.model_copy(update=seconds)

    metaops = tuple(
        metaop.model_copy(
            update={
                "curve": tuple(longer(number, metaop.batch_size, each) for each in metaop.curve),
                "shares": tuple(longer(number, metaop.batch_size, each) for each in metaop.shares),
            }
        )
        for number, metaop in enumerate(profile.metaops)
    )
    fields = {name: getattr(profile, name) for name in Profile.model_fields}
    return Profile(**{**fields, "metaops": metaops})


def ops(profile: Profile, plan: Plan) -> list[OpSeconds]:
    """What an op of each slice takes."""
    found = [times_of(profile.by_name[piece.metaop], piece, plan.cluster) for piece in plan.slices]
    return [each for each in found if each is not None]


@examples(60)
@given(
    plans(),
    st.lists(st.tuples(st.floats(0.25, 4), st.floats(0.25, 4)), min_size=23, max_size=23),
    st.sampled_from([NO_COSTS, COSTS]),
    st.floats(0, 1e-8),
)
def test_what_was_measured_is_predicted(
    plan: Plan, times: Times, costs: ProcessorCosts, update_s: float
) -> None:
    """Of whole batches and micro-batches, in shares that are equal or not, each with a factor of its own."""
    full = profile_behind(plan, costs)
    profile = without_inner_shares(full)
    truth = by_share(full, times).model_copy(update={"optimizer_s_per_byte": update_s})
    with tempfile.TemporaryDirectory() as folder:
        run = made_run(Path(folder) / "run", plan, truth)
        found = calibrate([run], profile, Path("profile.json")).profile
        as_it_was = made_run(Path(folder) / "same", plan, profile)
        same = calibrate([as_it_was], profile, Path("profile.json")).profile
        again = calibrate([run], found, Path("profile.json")).profile
    for old, new in zip(profile.metaops, same.metaops, strict=True):
        assert (new.shares, seconds(new)) == (old.shares, seconds(old))
    expected = ops(truth, plan)
    for calibrated in (found, again):
        for each, true in zip(ops(calibrated, plan), expected, strict=True):
            assert (each.forward_s, each.backward_s) == pytest.approx((true.forward_s, true.backward_s), 1e-7)
    if update_s == 0 or not any(piece for piece in found.metaops if piece.param_bytes_per_op):
        return
    iteration_s = predicted_again(plan, truth).iteration_s
    assert predicted_again(plan, found).iteration_s == pytest.approx(iteration_s, rel=1e-6)


def seconds(metaop: MetaOpProfile) -> list[tuple[float, float]]:
    """Of the points of its curve."""
    return [(point.forward_s, point.backward_s) for point in metaop.curve]
