"""Of random plans: after calibrating, the planner's formulas say what was measured, whatever the plan."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from calibration.made_runs import made_run, slower
from helpers.examples import examples
from helpers.random_plans import plans
from spindle_cli.calibrate.predicting import predicted_again
from spindle_cli.calibrate.run import calibrate
from spindle_cli.plan.types import Plan
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


@examples(40)
@given(
    plans(),
    st.lists(st.tuples(st.floats(0.25, 4), st.floats(0.25, 4)), min_size=10, max_size=10),
    st.sampled_from([NO_COSTS, COSTS]),
    st.floats(0, 1e-8),
)
def test_what_was_measured_is_predicted(
    plan: Plan, times: list[tuple[float, float]], costs: ProcessorCosts, update_s: float
) -> None:
    assume(not plan.micro_batches and all(piece.rows is None for piece in plan.slices))
    profile = profile_behind(plan, costs)
    truth = slower(profile, dict(zip(profile.by_name, times, strict=False)))
    truth = truth.model_copy(update={"optimizer_s_per_byte": update_s})
    with tempfile.TemporaryDirectory() as folder:
        run = made_run(Path(folder) / "run", plan, truth)
        found = calibrate([run], profile, Path("profile.json")).profile
        same = calibrate(
            [made_run(Path(folder) / "same", plan, profile)], profile, Path("profile.json")
        ).profile
    ran = {(piece.metaop, piece.dp, piece.tp) for piece in plan.slices}
    for metaop in found.metaops:
        for point, true, old, new in zip(
            metaop.curve,
            truth.by_name[metaop.name].curve,
            profile.by_name[metaop.name].curve,
            same.by_name[metaop.name].curve,
            strict=True,
        ):
            assert (new.forward_s, new.backward_s) == (old.forward_s, old.backward_s)
            if (metaop.name, point.dp, point.tp) in ran:
                measured = (point.forward_s, point.backward_s)
                assert measured == pytest.approx((true.forward_s, true.backward_s), rel=1e-7)
    expected = predicted_again(plan, truth)
    if update_s == 0 or not any(piece for piece in found.metaops if piece.param_bytes_per_op):
        return
    assert predicted_again(plan, found).iteration_s == pytest.approx(expected.iteration_s, rel=1e-6)
