"""The corpus of planning problems: its problems are the same everywhere, and tolerances are what they say."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from bench_plan import QUICK_S, is_quick, said_bounds, say_over_bounds
from plan_corpus.compare import Comparison, compare
from plan_corpus.drawn import KINDS, TEN_TASKS, drawn_tasks, read_tasks
from plan_corpus.measure import inputs_digest
from plan_corpus.problems import PROBLEMS
from plan_corpus.rows import Row, Table, read_table, write_table
from plan_corpus.tasks import Part, TaskWork, layer_s, profile_of

from spindle_cli.profile.types import Profile

ROW = Row("inputs", 10.0, 0, simulated_s=1.0, planned_s=1.0, lower_bound_s=0.8, slices=3, plan="bytes")
FROZEN = read_table()


def compared(*pairs: tuple[Row, Row]) -> Comparison:
    """Problems of one group, each as it was and as it is."""
    names = [f"p{number}" for number in range(len(pairs))]
    old = dict(zip(names, (before for before, _ in pairs), strict=True))
    new = dict(zip(names, (now for _, now in pairs), strict=True))
    return compare(old, new, dict.fromkeys(names, "group"))


def taking(simulated_s: float, planned_s: float | None = None) -> Row:
    return replace(ROW, simulated_s=simulated_s, planned_s=simulated_s if planned_s is None else planned_s)


def test_there_are_sixty_one_problems_and_all_are_frozen() -> None:
    assert len(PROBLEMS) == 61
    assert list(FROZEN.rows) == list(PROBLEMS)
    assert not any(row.violations for row in FROZEN.rows.values())
    assert {row.exit_code for row in FROZEN.rows.values()} == {0, 4}
    assert FROZEN.rows["no-plan"].exit_code == 4


@pytest.mark.parametrize("name", [name for name, row in FROZEN.rows.items() if is_quick(row)])
def test_the_files_of_a_quick_problem_are_those_that_were_frozen(name: str) -> None:
    assert inputs_digest(PROBLEMS[name]) == FROZEN.rows[name].inputs


def test_an_option_makes_another_problem() -> None:
    problem = PROBLEMS["no-plan"]
    assert inputs_digest(replace(problem, options=("--equal-shares",))) != inputs_digest(problem)
    assert inputs_digest(replace(problem, memory_gib=3)) != inputs_digest(problem)


def test_the_frozen_plans_are_of_every_size_and_group() -> None:
    devices = {problem.cluster().num_devices for problem in PROBLEMS.values()}
    assert {8, 16, 32, 64, 256, 1024} <= devices
    assert len({problem.group for problem in PROBLEMS.values()}) == 7
    types = {len(problem.cluster().types) for problem in PROBLEMS.values()}
    assert types == {1, 2, 3}


def test_problems_planned_within_six_seconds_are_quick() -> None:
    assert is_quick(replace(ROW, planning_s=QUICK_S))
    assert not is_quick(replace(ROW, planning_s=QUICK_S + 0.01))
    assert not is_quick(None)


def test_the_same_plan_breaks_nothing() -> None:
    assert compared((ROW, ROW)) == Comparison((), ())


def test_an_iteration_may_be_two_per_cent_longer_and_no_more() -> None:
    others = [(ROW, taking(0.98))]  # the group's mean stays
    assert compared((ROW, taking(1.02)), *others).broken == ()
    (line,) = compared((ROW, taking(1.0201)), *others).broken
    assert line.startswith("p0: 1020.10 ms, 2.01% longer than the frozen plan's 1000.00")


def test_a_group_may_be_half_a_per_cent_longer_in_the_geometric_mean() -> None:
    assert compared((ROW, taking(1.01)), (ROW, taking(1.005**2 / 1.01))).broken == ()
    (line,) = compared((ROW, taking(1.01)), (ROW, taking(1.0052**2 / 1.01))).broken
    assert line.startswith("group group: iterations 0.52% longer in the geometric mean")


@pytest.mark.parametrize("sign", [1, -1])
def test_one_plan_of_twenty_may_be_more_than_three_per_cent_from_its_simulation(sign: int) -> None:
    near, far = taking(1.0, 1 + sign * 0.03), taking(1.0, 1 + sign * 0.0301)
    assert compared(*[(ROW, near)] * 2).broken == ()
    assert compared(*[(ROW, near)] * 19, (ROW, far)).broken == ()
    (line,) = compared(*[(ROW, near)] * 18, (ROW, far)).broken
    assert line.startswith("1 plans are more than 3% from their simulation; at most 0 may be; new: p18")
    (line,) = compared(*[(ROW, near)] * 18, *[(ROW, far)] * 2).broken
    assert line.startswith("2 plans are more than 3% from their simulation; at most 1 may be; new: p18, p19")


def test_as_many_plans_may_be_far_from_their_simulation_as_were() -> None:
    far = taking(1.0, 1.2)
    assert compared((far, ROW), (ROW, far)).broken == ()
    (line,) = compared((far, far), (ROW, far)).broken
    assert line.endswith("at most 1 may be; new: p1")


def test_a_plan_that_is_lost_or_breaks_a_rule_is_broken() -> None:
    none = replace(ROW, exit_code=4)
    assert compared((ROW, none)).broken == ("p0: exit code 4; it was 0",)
    assert compared((none, none)).broken == ()
    assert compared((none, replace(ROW, exit_code=70))).broken == ("p0: exit code 70; it was 4",)
    found = compared((none, ROW))
    assert found.broken == ()
    assert found.pointed_out == ("p0: a plan where there was none",)
    ruled_out = replace(ROW, violations=("memory: too much",))
    assert compared((ROW, ruled_out)).broken == ("p0: the plan breaks rules: memory: too much",)
    assert compared((none, ruled_out)).pointed_out == ()
    stopped = replace(ROW, exit_code=None, planning_s=400.0)
    assert compared((ROW, stopped)).broken == ("p0: stopped after 400 s of planning, which took 10 s",)


def test_another_problem_under_the_same_name_is_not_compared() -> None:
    (line,) = compared((ROW, replace(taking(9.0), inputs="others"))).broken
    assert line == "p0: its files or options are not what was frozen: freeze it again"
    (line,) = compare({}, {"p0": ROW}, {"p0": "group"}).broken
    assert line == "p0: not in the table: freeze it"


def test_times_are_pointed_out_and_break_nothing() -> None:
    slower = [(ROW, replace(ROW, planning_s=seconds)) for seconds in (10.0, 10.0, 10.0, 11.0, 11.06)]
    found = compared(*slower)
    assert found.broken == ()
    assert found.pointed_out == ("p4: planned in 11.1 s, 1.11 times as long as it did",)
    every = compared(*[(ROW, replace(ROW, planning_s=20.0))] * 3)
    assert every.pointed_out == ("planning takes 2.00 times as long in the median: another machine?",)
    assert compared(*[(ROW, replace(ROW, planning_s=11.0))] * 3).pointed_out == ()
    short = replace(ROW, planning_s=1.0)
    others = [(ROW, ROW)] * 2
    assert compared((short, replace(ROW, planning_s=3.0)), *others).pointed_out == ()


def test_a_plan_more_than_two_per_cent_shorter_is_pointed_out() -> None:
    assert compared((ROW, taking(0.98))).pointed_out == ()
    assert compared((ROW, taking(0.979))).pointed_out == ("p0: 2.1% shorter than the frozen plan",)


def test_a_table_reads_as_it_was_written(tmp_path: Path) -> None:
    rows = {"a": replace(ROW, peak_memory_gib={"a800-80gb": 1.5}), "b": Row("inputs", 2.0, 4)}
    table = Table("a machine", "2026-11-28", rows)
    write_table(table, tmp_path / "table.json")
    assert read_table(tmp_path / "table.json") == table
    assert len(json.loads((tmp_path / "table.json").read_text())["problems"]) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_a_seed_and_a_number_give_the_same_tasks(kind: str) -> None:
    tasks = drawn_tasks(kind, 3, 5)
    assert tasks == drawn_tasks(kind, 3, 5)
    assert tasks != drawn_tasks(kind, 4, 5)
    assert [task.batch * 4 for task in tasks] == [task.batch for task in drawn_tasks(kind, 3, 5, scale=4)]


def test_the_ten_tasks_are_those_that_others_have_planned() -> None:
    """Their times were 0.00187114 s of a forward pass over the first batch, and so on to the last."""
    profile = profile_of("ten", read_tasks(TEN_TASKS))
    assert len(profile.metaops) == 37
    times = [[point.forward_s, point.backward_s] for metaop in profile.metaops for point in metaop.curve]
    assert times[0] == [0.00187114, 0.00374227]
    digest = hashlib.sha256(json.dumps(times).encode()).hexdigest()
    assert digest[:16] == "0b17a91fea7b8f10"


def test_lines_say_tasks() -> None:
    (task,) = read_tasks("t0 100: c0 768x197 39; c1 384x577 3 < c0")
    assert task == TaskWork("t0", 100, (Part("c0", 768, 197, 39), Part("c1", 384, 577, 3, ("c0",))))


def test_a_layer_takes_its_operations_and_the_sums_of_its_group() -> None:
    part = Part("c", width=1000, tokens=10, ops=1)  # 240.4 MFLOP and 20 kB a sample
    start_s = 176.550117e-6
    alone_s = layer_s(part, 4, 1, "a800-80gb", batch=8)
    assert alone_s == pytest.approx(start_s + 4 * 240.4e6 / (0.55 * 312e12), rel=1e-12)
    halved_s = layer_s(part, 4, 2, "a800-80gb", batch=8)
    more_s = 80e-6 / 3 + 4 * 20e3 / 2 / 60e9
    assert halved_s == pytest.approx(start_s + 2 * 240.4e6 / (0.55 * 312e12) + more_s, rel=1e-12)
    compared_s = layer_s(Part("loss", 0, 1, 1, is_loss=True), 4, 1, "a800-80gb", batch=8)
    assert compared_s == pytest.approx(start_s + 4 * 4 * 8 * 1024 / (0.55 * 312e12), rel=1e-12)


def test_a_curve_has_the_allocations_that_are_faster_than_all_smaller_ones() -> None:
    wide = profile_of("wide", [TaskWork("t", 4, (Part("c", 2048, 1024, 2),))], most_devices=16)
    points = wide.metaops[0].curve
    assert [(point.num_devices, point.dp, point.tp) for point in points] == [
        (1, 1, 1),
        (2, 2, 1),
        (4, 4, 1),
        (8, 4, 2),
        (16, 4, 4),
    ]
    assert [point.forward_s for point in points] == sorted((p.forward_s for p in points), reverse=True)


def test_a_profile_of_several_types_has_curve_and_shares_of_each() -> None:
    problem = PROBLEMS["graphs-0-4-on-h800-8-h20-8"]
    profile = Profile.from_data(json.loads(problem.profile_text()), where="the profile")
    for metaop in profile.metaops:
        assert {point.device for point in metaop.curve} == {"h800-80gb", "h20-96gb"}
        assert {share.device for share in metaop.shares} == {"h800-80gb", "h20-96gb"}


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"machine": "", "date": "", "problems": {"a": {"no": 1}}}']
)
def test_what_is_no_table_is_one_message(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="no table of plans"):
        read_table(path)


def test_plans_are_put_beside_each_of_their_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    row = replace(ROW, bounds_s={"whole batches": 0.8, "with memory": 0.5})
    assert said_bounds(row) == "800.00 500.00 -"
    say_over_bounds(
        {"p0": row, "p1": replace(row, simulated_s=4.0), "p2": replace(row, exit_code=4), "p3": ROW}
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "plan over bound, whole batches: 2.5000 in the geometric mean",
        "plan over bound, with memory: 4.0000 in the geometric mean",
    ]
    assert Row.of(json.loads(json.dumps(row.written()))) == row
