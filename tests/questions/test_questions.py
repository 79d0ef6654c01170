"""Questions about plans: each answer against one worked out by hand, or asked in another way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.cli import run_spindle
from helpers.cut import cuttable
from helpers.made import made_plan
from helpers.plans import FINGERPRINT, cluster_of, metaop_of
from helpers.uneven import uneven_plan
from spindle_cli.errors import ExitCode, InputError, NoPlanError, UsageError
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Device, MetaOpProfile, Profile, TaskShare, WorkloadRef
from spindle_cli.questions.compare import compare, comparison_table
from spindle_cli.questions.critical import Cause, critical_chain
from spindle_cli.questions.diff import change_lines, diff
from spindle_cli.questions.edit import edited, with_devices
from spindle_cli.questions.explain import explain
from spindle_cli.questions.sweep import default_counts, find_knee, parse_counts, sweep, sweep_table

CLUSTER = cluster_of(4)


def profile_of(*metaops: MetaOpProfile) -> Profile:
    return Profile(
        workload=WorkloadRef(name="test", fingerprint=FINGERPRINT, source="test.yaml"),
        device=Device(type="cpu", name="test", memory_bytes=4 * 2**30),
        metaops=metaops,
    )


def perfect(op_s: float) -> dict[int, float]:
    """A curve that n devices make n times as fast."""
    return {n: op_s / n for n in (1, 2, 4)}


TWO_TASKS = profile_of(
    metaop_of("big/layers", 6, perfect(0.04)),
    metaop_of("small/layers", 4, {1: 0.01, 2: 0.009, 4: 0.009}),
    metaop_of("small/loss", 1, {1: 0.002}, inputs=("small/layers",)),
)


def test_with_devices_takes_nodes_in_order_and_adds_to_the_last() -> None:
    cluster = cluster_of(8, devices_per_node=4)
    assert with_devices(cluster, 8).node_sizes == (4, 4)
    assert with_devices(cluster, 6).node_sizes == (4, 2)
    assert with_devices(cluster, 3).node_sizes == (3,)
    assert with_devices(cluster, 9).node_sizes == (4, 5)
    assert with_devices(cluster, 9).num_devices == 9
    with pytest.raises(UsageError, match="0 devices"):
        with_devices(cluster, 0)


def test_compare_holds_every_strategy_to_sequential() -> None:
    comparison = compare(TWO_TASKS, CLUSTER)
    rows = {row.strategy: row for row in comparison.strategies}
    assert list(rows) == ["spindle", "sequential", "distmm", "optimus"]
    assert rows["sequential"].speedup == 1.0
    assert rows["spindle"].iteration_s == min(row.iteration_s for row in rows.values() if row.iteration_s)
    assert rows["spindle"].iteration_s == made_plan(TWO_TASKS, CLUSTER).predicted.iteration_s


def test_compare_without_any_plan_says_why() -> None:
    with pytest.raises(NoPlanError):
        compare(TWO_TASKS, cluster_of(4, memory_gib=1e-4))


def test_leaving_a_task_out_keeps_the_others_as_they_are() -> None:
    left = edited(TWO_TASKS, ["small"], [])
    assert [metaop.name for metaop in left.metaops] == ["big/layers"]
    assert left.metaops[0] == TWO_TASKS.metaops[0]
    with pytest.raises(UsageError, match="only task"):
        edited(left, ["big"], [])
    with pytest.raises(UsageError, match="no task 'tiny'"):
        edited(TWO_TASKS, ["tiny"], [])


def test_a_batch_twice_as_large_costs_as_the_curve_says_of_shares() -> None:
    """op_s = 1 ms + 1 ms a sample, so a batch of 16 on two devices takes what one of 8 on one took: 9 ms."""
    affine = {n: 1e-3 + 8e-3 / n for n in (1, 2, 4)}
    doubled = edited(profile_of(metaop_of("task/layers", 3, affine)), [], ["task=16"]).metaops[0]
    assert doubled.batch_size == 16
    assert [point.num_devices for point in doubled.curve] == [1, 2, 4]
    assert [point.op_s for point in doubled.curve] == pytest.approx([17e-3, 9e-3, 5e-3])
    assert {point.source for point in doubled.curve} == {"fitted"}
    halved = edited(profile_of(metaop_of("task/layers", 3, affine)), [], ["task=6"]).metaops[0]
    assert [point.num_devices for point in halved.curve] == [1, 2, 3]  # what divides 6, up to 4
    assert halved.curve[0].op_s == pytest.approx(7e-3)


@pytest.mark.parametrize("text", ["task", "task=", "=4", "task=x", "task=-1", "small=0"])
def test_a_batch_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--batch"):
        edited(TWO_TASKS, [], [text])


def test_knee_is_where_added_devices_stop_paying() -> None:
    """1 to 2 doubles the speed; 2 to 4 gives half of what it could (still worth it); 4 to 8 a tenth."""
    assert find_knee([(1, 8.0), (2, 4.0), (4, 8 / 3), (8, 2.5)]) == 4
    assert find_knee([(1, 8.0), (2, 7.9)]) == 1
    assert find_knee([(4, 1.0)]) == 4


def test_sweep_counts_and_costs() -> None:
    assert default_counts(cluster_of(6)) == (1, 2, 4, 6)
    assert default_counts(cluster_of(1)) == (1,)
    assert parse_counts("8, 2") == (8, 2)
    with pytest.raises(UsageError, match="--devices"):
        parse_counts("1,x")
    result = sweep(TWO_TASKS, CLUSTER, (4, 1), price_per_device_hour=3600.0)
    assert [point.num_devices for point in result.points] == [1, 4]
    for point in result.points:
        assert point.iteration_s is not None and point.cost is not None
        assert point.cost == pytest.approx(point.num_devices * point.iteration_s)
    assert result.points[0].efficiency == 1.0


def test_sweep_says_where_too_few_devices_are() -> None:
    needs_two = profile_of(metaop_of("task/layers", 2, {2: 0.01, 4: 0.005}))
    result = sweep(needs_two, CLUSTER, (1, 2))
    points = result.points
    assert points[0].iteration_s is None and "task/layers" in (points[0].failure or "")
    assert points[1].iteration_s is not None
    table = sweep_table(result)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert [row[:2] for row in rows] == [("1", "no plan"), ("2", rows[1][1])]
    assert [row[-1] for row in rows] == [points[0].failure, "<- knee"]


def test_the_chain_leads_from_the_start_to_the_end_without_a_hole() -> None:
    plan = made_plan(TWO_TASKS, CLUSTER)
    chain = critical_chain(plan)
    assert chain[0].cause is Cause.START
    assert chain[-1].end_s == pytest.approx(plan.predicted.compute_s)
    covered = sum(link.end_s - link.start_s + link.idle_s for link in chain)
    assert covered == pytest.approx(plan.predicted.compute_s, rel=1e-5)


def test_sequential_chain_is_every_slice() -> None:
    plan = made_plan(TWO_TASKS, CLUSTER, "sequential")
    assert len(critical_chain(plan)) == len(plan.slices)


def test_dual_value_of_a_device_agrees_with_solving_again() -> None:
    """With perfect curves and nothing critical the bound is W / N: its derivative is -W / N^2."""
    curve = {n: 0.04 / n for n in range(1, 9)}
    many = profile_of(*(metaop_of(f"t{i}/layers", 8, curve, batch_size=840) for i in range(4)))
    worth = explain(made_plan(many, CLUSTER), many, plan_name="p").worth
    assert worth is not None and worth.fewer is not None
    work_s = 4 * 8 * 0.04
    assert worth.lower_bound_s == pytest.approx(work_s / 4)
    assert worth.device_part == pytest.approx(1.0)
    assert worth.device_value_s == pytest.approx(work_s / 16)
    assert worth.fewer.lower_bound_s == pytest.approx(work_s / 3)
    assert worth.more.lower_bound_s == pytest.approx(work_s / 5)


def test_every_choice_of_the_bound_wastes_nothing_and_all_ops_have_reasons() -> None:
    plan = made_plan(TWO_TASKS, CLUSTER)
    for reason in explain(plan, TWO_TASKS, plan_name="p").reasons:
        taken = [choice for choice in reason.choices if choice.bound_ops]
        assert taken and all(choice.priced == pytest.approx(0, abs=1e-6) for choice in taken)
        assert sum(choice.plan_ops for choice in reason.choices) == plan.by_name[reason.metaop].num_ops


def test_explain_refuses_another_plans_profile() -> None:
    other = edited(TWO_TASKS, ["small"], [])
    with pytest.raises(InputError, match="made from the profile"):
        explain(made_plan(TWO_TASKS, CLUSTER), other, plan_name="p")


def test_a_plan_does_not_differ_from_itself_and_does_from_another_strategys() -> None:
    plan, sequential = made_plan(TWO_TASKS, CLUSTER), made_plan(TWO_TASKS, CLUSTER, "sequential")
    same = diff(plan, plan, before_name="a", after_name="b")
    assert same.same and not same.changes and same.iteration.growth == 0
    assert change_lines(same) == "the plans are the same"
    other = diff(plan, sequential, before_name="a", after_name="b")
    assert not other.same
    assert {"strategy", "big/layers"} <= {change.what for change in other.changes}


def _written(folder: Path) -> tuple[Path, Path, Path, Path]:
    profile, cluster = folder / "profile.json", folder / "cluster.yaml"
    profile.write_text(TWO_TASKS.model_dump_json(by_alias=True))
    cluster.write_text(json.dumps(CLUSTER.model_dump(mode="json", by_alias=True)))
    fast, slow = folder / "fast.yaml", folder / "slow.yaml"
    write_plan(fast, made_plan(TWO_TASKS, CLUSTER))
    write_plan(slow, made_plan(TWO_TASKS, CLUSTER, "sequential"))
    return profile, cluster, fast, slow


def test_commands_print_one_json_document_each_and_end_as_promised(tmp_path: Path) -> None:
    profile, cluster, fast, slow = _written(tmp_path)
    for arguments in (
        ("compare", profile, "--cluster", cluster, "--without", "small"),
        ("sweep", profile, "--cluster", cluster, "--devices", "2,4", "--batch", "big=4"),
        ("explain", fast, "--profile", profile),
        ("diff", fast, slow),
    ):
        ended = run_spindle(*arguments, "--json")
        assert ended.code == ExitCode.DONE, ended.err
        assert json.loads(ended.out)["schema"].startswith("spindle.")
        assert run_spindle(*arguments).code == ExitCode.DONE
    grown = run_spindle("diff", fast, slow, "--max-growth", 3, "--json")
    assert grown.code == ExitCode.FAILED and "grew by" in grown.err
    assert not json.loads(grown.out)["same"]
    assert run_spindle("diff", slow, fast, "--max-growth", 3).code == ExitCode.DONE
    assert run_spindle("compare", profile, "--cluster", cluster, "--batch", "big").code == ExitCode.USAGE
    assert Plan.read(fast).strategy == "spindle"


# Three of four steps run a alone; the fourth runs both.
SAMPLED = TWO_TASKS.model_copy(
    update={
        "task_sets": (
            TaskShare(tasks=("big",), share=0.75),
            TaskShare(tasks=("big", "small"), share=0.25),
        )
    }
)


def by_hand(plan: Plan, what: str) -> float:
    """The mean of the steps, from the plans of the sets."""
    shares = {("big",): 0.75, ("big", "small"): 0.25}
    return sum(shares[tasks] * float(getattr(own.predicted, what)) for tasks, own in plan.set_plans.items())


def test_compare_and_sweep_speak_of_the_mean_step_where_steps_run_sets_of_tasks() -> None:
    plan = made_plan(SAMPLED, CLUSTER)
    assert by_hand(plan, "iteration_s") < plan.predicted.iteration_s
    comparison = compare(SAMPLED, CLUSTER)
    row = comparison.strategies[0]
    for what in ("iteration_s", "compute_s", "transfer_s", "gradient_sum_s", "optimizer_s"):
        assert getattr(row, what) == pytest.approx(by_hand(plan, what))
    bound_s = by_hand(plan, "lower_bound_s")
    assert comparison.lower_bound_s == pytest.approx(bound_s)
    assert row.over_bound == pytest.approx(by_hand(plan, "compute_s") / bound_s - 1)
    needs = [own.predicted.peak_memory_bytes for own in plan.set_plans.values()]
    assert row.peak_memory_bytes == max(max(each) for each in needs)
    assert [each.share for each in comparison.task_sets] == [0.75, 0.25]
    point = sweep(SAMPLED, CLUSTER, (4,)).points[0]
    assert point.iteration_s == pytest.approx(by_hand(plan, "iteration_s"))
    assert "75% big; 25% big, small" in str(comparison_table(comparison).title)


def test_diff_judges_the_mean_step() -> None:
    before, after = made_plan(TWO_TASKS, CLUSTER), made_plan(SAMPLED, CLUSTER)
    found = diff(before, after, before_name="a", after_name="b")
    assert found.iteration.before == before.predicted.iteration_s
    assert found.iteration.after == pytest.approx(by_hand(after, "iteration_s"))
    assert ("tasks of the steps", "all", "75% big; 25% big, small") in [
        (change.what, change.before, change.after) for change in found.changes
    ]


def test_a_set_of_tasks_is_explained_by_its_own_plan_and_curves() -> None:
    plan = made_plan(SAMPLED, CLUSTER)
    found = explain(plan.set_plans["big",], SAMPLED, plan_name="p")
    alone = explain(made_plan(WITHOUT_SMALL, CLUSTER), WITHOUT_SMALL, plan_name="p")
    assert found.tasks == ("big",) and alone.tasks == ()
    assert {link.metaop for link in found.chain} == {"big/layers"} == {each.metaop for each in found.reasons}
    assert found.worth is not None and alone.worth is not None
    assert found.worth.lower_bound_s == pytest.approx(alone.worth.lower_bound_s)


WITHOUT_SMALL = edited(TWO_TASKS, ["small"], [])


def test_without_a_task_its_steps_are_those_of_the_others() -> None:
    three = SAMPLED.model_copy(
        update={
            "task_sets": (
                TaskShare(tasks=("big",), share=0.5),
                TaskShare(tasks=("big", "small"), share=0.3),
                TaskShare(tasks=("small",), share=0.2),
            )
        }
    )
    assert edited(three, ["small"], []).task_sets == ()  # every step left runs all that is left
    assert edited(SAMPLED, ["big"], []).task_sets == ()
    more = profile_of(*TWO_TASKS.metaops, metaop_of("last/layers", 1, {1: 0.01})).model_copy(
        update={
            "task_sets": (
                TaskShare(tasks=("big", "last"), share=0.5),
                TaskShare(tasks=("small", "last"), share=0.3),
                TaskShare(tasks=("small",), share=0.2),
            )
        }
    )
    left = edited(more, ["small"], []).task_sets
    assert [each.tasks for each in left] == [("big", "last"), ("last",)]
    assert [each.share for each in left] == pytest.approx([0.625, 0.375])
    assert made_plan(edited(more, ["small"], []), CLUSTER).task_sets


def test_the_command_explains_the_steps_that_take_most_of_the_time(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.yaml", made_plan(SAMPLED, CLUSTER))
    found = run_spindle("explain", str(tmp_path / "plan.yaml"))
    assert ", of steps that run big\n" in found.out
    assert "of the time of all steps; --tasks shows others: big; big,small" in found.err
    other = run_spindle("explain", str(tmp_path / "plan.yaml"), "--tasks", "small,big")
    assert "of steps that run big, small" in other.out
    wrong = run_spindle("explain", str(tmp_path / "plan.yaml"), "--tasks", "small")
    assert wrong.code == ExitCode.USAGE and "the plan has nothing for steps of just these" in wrong.err


def test_a_diff_tells_shares_apart() -> None:
    net = cuttable("t/net", 1, {8: 2.0, 4: 1.2})
    before, after = uneven_plan(net, (0, 5, 8)), uneven_plan(net, (0, 6, 8))
    (change,) = [
        each for each in diff(before, after, before_name="a", after_name="b").changes if each.what == "t/net"
    ]
    assert (change.before, change.after) == (
        "ops 0:1 on [0, 1] (dp 2, rows [0, 5, 8])",
        "ops 0:1 on [0, 1] (dp 2, rows [0, 6, 8])",
    )
