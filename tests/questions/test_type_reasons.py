"""Why MetaOps got their types of device: prices, seconds and shares against those worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from helpers.cli import run_spindle
from helpers.made import made_plan
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.errors import ExitCode
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.reasons import (
    OneMore,
    OnTypes,
    TypeReason,
    TypeReasons,
    TypeShares,
    type_reasons,
)
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import MetaOpProfile, Profile
from spindle_cli.questions.explain import explain, type_reasons_text

SCHEMA = Path(__file__).parents[2] / "schemas" / "explanation.json"
ONE_EACH = cluster_of_types({"h800": 1, "h20": 1})
# One sample each, so that an op has one device. The ten of text are the only ones that both types do in the
# program's optimum (vision and 8.08 of them on the h800, audio and 1.92 on the h20, 10.08 s). On these an h20
# takes four times as long, so a second of an h800 is worth four of its own: 0.8 and 0.2 s of the bound.
TEXTS = tuple(metaop_on_types(f"text{n}/net", 1, {"h800": 1.0, "h20": 4.0}, batch_size=1) for n in range(10))
VISION = metaop_on_types("vision/net", 2, {"h800": 1.0, "h20": 6.0}, batch_size=1)
AUDIO = metaop_on_types("audio/net", 2, {"h800": 1.0, "h20": 1.2}, batch_size=1)
TASKS = profile_on_types(VISION, AUDIO, *TEXTS)
# Two ops on 6 samples, which one of each type does in 4 and 2: 4 s an op.
CHAIN = profile_on_types(metaop_on_types("t/net", 2, {"fast": 1.0, "slow": 2.0}, batch_size=6))
FAST_AND_SLOW = cluster_of_types({"fast": 1, "slow": 1})


def reasons_of(plan: Plan, profile: Profile) -> TypeReasons:
    found = type_reasons(plan, profile)
    assert found is not None
    return found


def chain_reason(plan: Plan, profile: Profile = CHAIN) -> TypeReason:
    (reason,) = reasons_of(plan, profile).metaops
    return reason


def test_each_runs_where_it_loses_least_by_what_types_are_worth() -> None:
    found = reasons_of(made_plan(TASKS, ONE_EACH), TASKS)
    assert found.prices == pytest.approx({"h800": 0.8, "h20": 0.2})
    vision, audio, *texts = found.metaops
    (taken,) = vision.in_plan
    assert (taken.of_types, taken.op_s, taken.ops) == ({"h800": 1}, 1.0, 2)
    assert taken.priced == pytest.approx(0, abs=1e-6)
    (h20,) = taken.alone
    assert (h20.of_types, h20.op_s) == ({"h20": 1}, 6.0)
    assert h20.priced == pytest.approx(6 * 0.2 / 0.8 - 1)
    (taken,) = audio.in_plan
    assert (taken.of_types, taken.op_s, taken.ops) == ({"h20": 1}, pytest.approx(1.2), 2)
    (h800,) = taken.alone
    assert (h800.of_types, h800.op_s) == ({"h800": 1}, 1.0)
    assert h800.priced == pytest.approx(0.8 / (1.2 * 0.2) - 1)
    assert audio.fastest == h800
    assert audio.cheapest.of_types == {"h20": 1} and audio.cheapest.priced == pytest.approx(0, abs=1e-6)
    for each in texts:  # on either they cost the same
        assert each.in_plan[0].alone[0].priced == pytest.approx(0, abs=1e-6)
        assert each.in_plan[0].priced == pytest.approx(0, abs=1e-6)
    in_bound = {
        (reason.metaop, *each.of_types): each.ops for reason in found.metaops for each in reason.in_bound
    }
    assert in_bound["vision/net", "h800"] == in_bound["audio/net", "h20"] == pytest.approx(2)
    on_h800 = sum(ops for (name, kind), ops in in_bound.items() if name.startswith("text") and kind == "h800")
    assert on_h800 == pytest.approx(8.08)
    assert all(more.op_s is None for reason in found.metaops for more in reason.in_plan[0].one_more)


def test_that_is_told_in_lines() -> None:
    lines = type_reasons_text(reasons_of(made_plan(TASKS, ONE_EACH), TASKS)).splitlines()
    assert lines[:8] == [
        "why these types: by the program's prices a second of h20 is worth 1, of h800 4",
        "'wastes' is what an op costs by these prices over the cheapest allocation",
        "vision/net: 2 of 2 ops on 1 h800 in 1 s each, wastes 0.0%",
        "    instead on 1 h20 6 s (6x), wastes 50.0%",
        "    shares: 1 x 1 sample on h800 1 s; one more h800 or h20: no sample is left for it",
        "audio/net: 2 of 2 ops on 1 h20 in 1.2 s each, wastes 0.0%",
        "    instead fastest on 1 h800 1 s (0.833x), wastes 233.3%",
        "    shares: 1 x 1 sample on h20 1.2 s; one more h800 or h20: no sample is left for it",
    ]


def test_shares_end_together_and_what_one_more_brings() -> None:
    """Another fast one: 3 + 2 + 1, or 2 + 3 + 1, 3 s. Another slow one: 4 + 1 + 1 take as long as 4 + 2."""
    reason = chain_reason(made_plan(CHAIN, FAST_AND_SLOW))
    (taken,) = reason.in_plan
    assert (taken.of_types, taken.op_s, taken.ops) == ({"fast": 1, "slow": 1}, 4.0, 2)
    assert taken.shares == (
        TypeShares(device="fast", num_shares=1, samples=4, share_s=4.0),
        TypeShares(device="slow", num_shares=1, samples=2, share_s=4.0),
    )
    assert taken.best_cut_s == 4.0
    assert [(each.of_types, each.op_s) for each in taken.alone] == [({"fast": 1}, 6.0), ({"slow": 1}, 12.0)]
    assert taken.one_more == (OneMore(device="fast", op_s=3.0), OneMore(device="slow", op_s=4.0))
    reason = reason.model_copy(update={"critical": 1.0})
    text = type_reasons_text(TypeReasons(prices={"fast": 0.0, "slow": 0.0}, metaops=(reason,)))
    assert "no device is worth anything: chains of MetaOps hold up all" in text
    assert "t/net (critical 1.00): 2 of 2 ops on 1 fast + 1 slow in 4 s each" in text
    assert (
        "shares: 1 x 4 samples on fast 4 s, 1 x 2 samples on slow 4 s, end together; "
        "one more fast: 3 s (-25.0%); one more slow: no faster" in text
    )


def test_shares_that_could_be_cut_better_say_so() -> None:
    """Equal shares of 3: the fast one is through in 3 s, the slow one in 6, where 4 and 2 take 4."""
    reason = chain_reason(made_plan(CHAIN, FAST_AND_SLOW, "dp-even"))
    (taken,) = reason.in_plan
    assert (taken.op_s, taken.best_cut_s) == (6.0, 4.0)
    assert [(each.samples, each.share_s) for each in taken.shares] == [(3, 3.0), (3, 6.0)]
    text = type_reasons_text(TypeReasons(prices={"fast": 0.1, "slow": 0.0}, metaops=(reason,)))
    assert "a second of fast is worth 1, of slow nothing" in text
    assert "on slow 6 s, the first through 50.0% before the last; the best cut takes 4 s" in text


def test_no_whole_samples_may_end_together() -> None:
    """Of 4 samples the fast device does 3 while the slow one does 1, in 2 s."""
    profile = profile_on_types(metaop_on_types("t/net", 2, {"fast": 1.0, "slow": 2.0}, batch_size=4))
    reason = chain_reason(made_plan(profile, FAST_AND_SLOW), profile)
    assert [(each.samples, each.share_s) for each in reason.in_plan[0].shares] == [(3, 3.0), (1, 2.0)]
    text = type_reasons_text(TypeReasons(prices={"fast": 0.1, "slow": 0.1}, metaops=(reason,)))
    assert "the first through 33.3% before the last, and no cut of whole samples ends earlier" in text


def test_micro_batches_are_compared_as_the_plan_cuts_them() -> None:
    """Two of 3 samples, each 2 + 1 in 2 s: 4 s an op. A third device leaves one sample each: 2 s for the slow
    one. Alone, the fast device does both in 3 s each.
    """
    plan = make_plan(CHAIN, FAST_AND_SLOW, micro_batches={"t": 2})
    reason = chain_reason(plan)
    assert reason.micro_batches == 2
    (taken,) = reason.in_plan
    assert (taken.op_s, taken.ops, taken.best_cut_s) == (4.0, 2, 4.0)
    assert [(each.samples, each.share_s) for each in taken.shares] == [(2, 4.0), (1, 4.0)]
    assert [each.op_s for each in taken.alone] == [6.0, 12.0]
    assert [each.op_s for each in taken.one_more] == [4.0, 4.0]
    assert reason.fastest.op_s == 4.0


@pytest.mark.usefixtures("whole_searches")
def test_micro_batches_cost_what_all_of_them_do() -> None:
    """Vision as two micro-batches of a sample: on the h800 a second each, and none costs less by the prices,
    which are those of one sample.
    """
    vision = metaop_on_types("vision/net", 1, {"h800": 1.0, "h20": 6.0}, batch_size=2)
    profile = profile_on_types(vision, AUDIO, *TEXTS)
    found = reasons_of(make_plan(profile, ONE_EACH, micro_batches={"vision": 2}), profile)
    assert found.prices == pytest.approx({"h800": 0.8, "h20": 0.2})
    (taken,) = found.metaops[0].in_plan
    assert (taken.of_types, taken.op_s, taken.ops) == ({"h800": 1}, 2.0, 1)
    assert taken.priced == pytest.approx(0, abs=1e-6)
    assert taken.alone[0].priced == pytest.approx(6 * 0.2 / 0.8 - 1)


def in_pairs(metaop: MetaOpProfile) -> MetaOpProfile:
    """The same on two devices for each share, with the same times."""
    shares = tuple(share.model_copy(update={"tp": 2}) for share in metaop.shares)
    curve = tuple(
        point.model_copy(update={"tp": 2, "num_devices": 2 * point.num_devices}) for point in metaop.curve
    )
    return metaop.model_copy(update={"shares": shares, "curve": curve})


def test_devices_that_hold_a_share_together_count_as_devices() -> None:
    """Pairs that take what single devices do: on two of each type rows of 4 and 2. As many devices of one
    type, 4, are not there: its two do the whole batch.
    """
    profile = profile_on_types(in_pairs(CHAIN.metaops[0]))
    cluster = cluster_of_types({"fast": 2, "slow": 2})
    (taken,) = chain_reason(made_plan(profile, cluster), profile).in_plan
    assert (taken.of_types, taken.tp, taken.op_s) == ({"fast": 2, "slow": 2}, 2, 4.0)
    assert [(each.num_shares, each.samples) for each in taken.shares] == [(1, 4), (1, 2)]
    assert [(each.of_types, each.tp, each.op_s) for each in taken.alone] == [
        ({"fast": 2}, 2, 6.0),
        ({"slow": 2}, 2, 12.0),
    ]
    assert [each.op_s for each in taken.one_more] == [3.0, 4.0]
    text = type_reasons_text(reasons_of(made_plan(profile, cluster), profile))
    assert "on 2 fast + 2 slow (tp 2) in 4 s each" in text and "2 more fast: 3 s" in text


@pytest.mark.parametrize("tp", [1, 2])
def test_as_many_devices_of_one_type_and_not_more(tp: int) -> None:
    """Four fast devices, or pairs, and two slow ones: where three run an op, three fast ones are what it is
    compared with.
    """
    metaops = [metaop_on_types(f"{n}/net", 1, {"fast": 1.0, "slow": 1.0}, batch_size=12) for n in range(3)]
    ask = profile_on_types(*(in_pairs(metaop) if tp == 2 else metaop for metaop in metaops))
    cluster = cluster_of_types({"fast": 4 * tp, "slow": 2 * tp})
    fewer = 0
    for reason in reasons_of(made_plan(ask, cluster), ask).metaops:
        for taken in reason.in_plan:
            request = sum(taken.of_types.values())
            alone = {kind: each for each in taken.alone for kind in each.of_types}
            for kind, room in cluster.num_of_type.items():
                if taken.of_types != {kind: request}:
                    fewer += request < room
                    assert alone[kind].of_types == {kind: min(request, room)}
                    assert alone[kind].op_s == 12 / (min(request, room) // tp)
            assert len(taken.alone) == 2 - (len(taken.of_types) == 1)
    assert fewer


def test_what_shares_parameters_out_says_so() -> None:
    plan = made_plan(CHAIN, FAST_AND_SLOW)
    shared = plan.model_copy(update={"sharding": {"t/net": Sharding.PARAMETERS}})
    assert not chain_reason(plan).shares_out and chain_reason(shared).shares_out
    assert not chain_reason(plan.model_copy(update={"sharding": {"t/net": Sharding.OPTIMIZER}})).shares_out
    line = "    its devices share out its parameters, so it cannot run on others alone"
    assert line in type_reasons_text(reasons_of(shared, CHAIN)).splitlines()


def test_ops_on_several_allocations_come_with_most_ops_first() -> None:
    """What ops run on, and what they are compared with, is not less than the cheapest by the prices."""
    profile = profile_on_types(
        metaop_on_types("vision/net", 12, {"h800": 1.0, "h20": 6.0}),
        metaop_on_types("audio/net", 12, {"h800": 1.0, "h20": 1.5}),
    )
    found = reasons_of(made_plan(profile, cluster_of_types({"h800": 4, "h20": 4})), profile)
    assert any(len(reason.in_plan) > 1 for reason in found.metaops)
    for reason in found.metaops:
        ops = [taken.ops for taken in reason.in_plan]
        assert ops == sorted(ops, reverse=True) and sum(ops) == 12
        everything: list[OnTypes] = [*reason.in_plan, reason.fastest, reason.cheapest]
        everything += [each for taken in reason.in_plan for each in taken.alone]
        assert min(each.priced for each in everything) >= -1e-9
        assert min(each.op_s for each in everything) == reason.fastest.op_s
        assert min(each.priced for each in everything) == reason.cheapest.priced
    text = type_reasons_text(found)
    assert text.count("\n    also ") == sum(len(reason.in_plan) - 1 for reason in found.metaops)


def test_three_types_have_a_price_each() -> None:
    """Ops of a sample, of which a device of the second type does half as many, and of the third a quarter."""
    ops = [metaop_on_types(f"{n}/net", 1, {"a": 1.0, "b": 2.0, "c": 4.0}, batch_size=1) for n in range(7)]
    profile, cluster = profile_on_types(*ops), cluster_of_types({"a": 1, "b": 1, "c": 1})
    found = reasons_of(made_plan(profile, cluster), profile)
    # 7 ops in 7 / (1 + 1/2 + 1/4) = 4 s; of 1 s of the bound, each type has as much as it does of the ops
    assert found.prices == pytest.approx({"a": 4 / 7, "b": 2 / 7, "c": 1 / 7})
    assert sum(each.ops for reason in found.metaops for each in reason.in_bound) == pytest.approx(7)
    for reason in found.metaops:
        assert [each.priced for each in reason.in_plan[0].alone] == pytest.approx([0, 0], abs=1e-6)
    assert "a second of c is worth 1, of a 4, of b 2" in type_reasons_text(found)


def test_the_command_tells_it_in_text_and_in_json(tmp_path: Path) -> None:
    plan = made_plan(CHAIN, FAST_AND_SLOW)
    write_plan(tmp_path / "plan.yaml", plan)
    (tmp_path / "profile.json").write_text(CHAIN.model_dump_json(by_alias=True))
    arguments = ("explain", tmp_path / "plan.yaml", "--profile", tmp_path / "profile.json")
    text = run_spindle(*arguments)
    assert text.code == ExitCode.DONE
    assert "why these types: by the program's prices a second of" in text.out
    assert "2 of 2 ops on 1 fast + 1 slow in 4 s each" in text.out
    assert "\n    shares: 1 x 4 samples on fast 4 s, 1 x 2 samples on slow 4 s, end together" in text.out
    document = json.loads(run_spindle(*arguments, "--json").out)
    jsonschema.validate(document, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert document["type_reasons"] == reasons_of(plan, CHAIN).model_dump(mode="json")
    assert document["reasons"] == []
    without = run_spindle("explain", tmp_path / "plan.yaml")
    assert without.code == ExitCode.DONE and "why these types" not in without.out
    assert "give --profile PROFILE.json" in without.out


def test_one_type_has_its_reasons_as_before() -> None:
    one = cluster_of_types({"fast": 2})
    found = explain(made_plan(CHAIN, one), CHAIN, plan_name="plan.yaml")
    assert found.type_reasons is None and found.reasons
    assert type_reasons_text(found.type_reasons) == ""
