"""Every strategy with more devices of one type or another: plans by hand, and which addition is best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from rich.table import Table

from helpers.cli import Ended, run_spindle
from helpers.plans import cluster_of, metaop_of, profile_of
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.errors import ExitCode, NoPlanError
from spindle_cli.files.cluster import Cluster, NodeGroup
from spindle_cli.profile.types import Profile, TaskShare
from spindle_cli.questions.additions import additions, parse_additions
from spindle_cli.questions.compare import compare
from spindle_cli.questions.compare_additions import (
    ComparedAdditions,
    best_lines,
    compare_additions,
    compared_tables,
    no_plan_lines,
)

SCHEMA = Path(__file__).parents[2] / "schemas" / "compared-additions.json"
# Two ops on 6 samples: a second each on a fast device, two on a slow one.
MIXED = profile_on_types(metaop_on_types("t/net", 2, {"fast": 1.0, "slow": 2.0}, batch_size=6))
NEARLY = 1e-3  # what messages and sums add to an iteration


def one_of_each(fast: float | None = 3600.0, slow: float | None = 1800.0, **more: Any) -> Cluster:
    """A node of one device of each type, of 300 and 100 W, at these prices."""
    cluster = cluster_of_types({"fast": 1, "slow": 1})
    groups = [
        group.model_copy(update={"price_per_device_hour": price, "watts_per_device": watts})
        for group, price, watts in zip(cluster.nodes, (fast, slow), (300.0, 100.0), strict=True)
    ]
    return cluster.changed(nodes=tuple(groups), **more)


def request(cluster: Cluster, *texts: str, profile: Profile = MIXED) -> ComparedAdditions:
    return compare_additions(profile, cluster, parse_additions(texts, profile, cluster))


def test_each_strategy_is_planned_for_each_addition_by_itself() -> None:
    """Rows 4 + 2 take 8 s; with another fast one 3 + 2 + 1 6 s; with another slow one 4 + 1 + 1 8 s. Equal
    shares of 3 samples take 12 s, and of 2 samples 8 s, whichever the third device.
    """
    result = request(one_of_each(), "fast=1", "slow=1")
    before, (fast, slow) = result.as_it_is, result.additions
    seconds = {
        name: [row.iteration_s for row in each.strategies if row.strategy != "dp-flops"]
        for name, each in (("before", before), ("fast", fast), ("slow", slow))
    }
    assert seconds["before"] == pytest.approx([8, 8, 12], rel=NEARLY)
    assert seconds["fast"] == pytest.approx([6, 6, 8], rel=NEARLY)
    assert seconds["slow"] == pytest.approx([8, 8, 8], rel=NEARLY)
    assert fast.times_as_fast == pytest.approx(
        {"spindle": 8 / 6, "sequential": 8 / 6, "dp-even": 12 / 8}, rel=NEARLY
    )
    assert (before.of_types, fast.of_types) == ({"fast": 1, "slow": 1}, {"fast": 2, "slow": 1})
    assert (slow.group, slow.device, slow.num_added, slow.num_nodes, slow.num_devices) == (
        *("slow", "slow"),
        *(1, 1, 3),
    )
    assert [row.price_per_hour for row in fast.strategies[:3]] == [9000] * 3
    assert [before.lower_bound_s, fast.lower_bound_s, slow.lower_bound_s] == pytest.approx([8, 6, 8])


def test_its_rows_are_those_of_compare_and_of_sweep() -> None:
    cluster = one_of_each(co2_grams_per_kwh=360)
    result = request(cluster, "fast=1", "slow=1")
    assert result.as_it_is.strategies == compare(MIXED, cluster).strategies
    swept = additions(MIXED, cluster, parse_additions(["fast=1", "slow=1"], MIXED, cluster))
    for own, other in zip(result.additions, swept.additions, strict=True):
        row = own.strategies[0]
        assert row.strategy == "spindle"
        assert (row.iteration_s, row.cost, row.energy_j, row.co2_g) == (
            *(other.iteration_s, other.cost, other.energy_j, other.co2_g),
        )
        assert own.times_as_fast["spindle"] == other.speedup
        assert own.lower_bound_s == other.lower_bound_s


def test_the_best_is_better_than_nothing_or_there_is_none() -> None:
    """By time another fast one; an iteration costs 12 without, and 15 or 16 with."""
    result = request(one_of_each(), "fast=1", "slow=1")
    assert [row.best_by for row in result.additions] == [("time",), ()]
    assert best_lines(result).splitlines() == [
        "best by time: spindle with 1 more fast: 1.33x as fast as spindle with nothing added",
        "best by money: spindle with nothing added, as no addition is better: with the best, spindle with "
        "1 more fast, an iteration costs 25.0% more",
        "best by energy: spindle with nothing added, as no addition is better: with the best, spindle with "
        "1 more slow, an iteration draws 25.0% more",
    ]
    same = request(one_of_each(), "slow=1")
    assert same.additions[0].best_by == ()
    assert best_lines(same).startswith(
        "best by time: spindle with nothing added, as no addition is better: with the best, spindle with "
        "1 more slow, an iteration takes as much\n"
    )


def test_what_is_added_may_pay_for_itself() -> None:
    """Two slow devices for nothing: rows 3 + 1 + 1 + 1, 6 s at 1 a second instead of 8."""
    result = request(one_of_each(slow=0), "slow=2")
    assert result.additions[0].best_by == ("time", "money")
    assert (
        "best by money: spindle with 2 more slow: an iteration costs 25.0% less than spindle with nothing "
        "added" in best_lines(result).splitlines()
    )
    for_free = request(one_of_each(fast=0, slow=0), "slow=2")
    assert "2 more slow, an iteration costs as much" in best_lines(for_free)


def test_another_strategy_than_ours_may_be_best() -> None:
    result = request(one_of_each(), "fast=1")
    (row,) = result.additions
    quicker = [
        each.model_copy(update={"iteration_s": 4.0}) if each.strategy == "dp-even" else each
        for each in row.strategies
    ]
    told = result.model_copy(update={"additions": (row.model_copy(update={"strategies": tuple(quicker)}),)})
    assert best_lines(told).startswith("best by time: dp-even with 1 more fast: 2.00x as fast as spindle")


def test_equally_good_additions_are_all_best() -> None:
    alone = profile_of(metaop_of("t/net", 4, {1: 1.0, 2: 0.5, 3: 0.4}, batch_size=6))
    groups = tuple(NodeGroup(name=name, devices=1, device="cpu", memory_gib=4) for name in "ab")
    cluster = cluster_of(2).changed(nodes=groups)
    result = request(cluster, "a=1", "b=1", profile=alone)
    assert [row.best_by for row in result.additions] == [("time",), ("time",)]
    assert best_lines(result).startswith("best by time: spindle with 1 more a or spindle with 1 more b: 1.")
    assert [row.strategy for row in result.as_it_is.strategies][-1] == "optimus"


def cells(table: Table) -> list[list[str]]:
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def test_tables_of_time_and_of_what_is_known() -> None:
    time, cost, energy = compared_tables(request(one_of_each(), "fast=1", "slow=1"))
    assert cells(time)[:2] == [
        ["strategy", "nothing added", "1 more fast", "1 more slow"],
        ["spindle", "8 s", "6 s (1.33x)", "8 s (1.00x)"],
    ]
    assert cells(time)[-1] == ["dp-flops", "no plan", "no plan", "no plan"]
    assert cells(cost)[1] == ["spindle", "12", "15", "16"]
    assert cells(cost)[-1] == ["price/h", "5400", "9000", "7200"]
    assert [row[0] for row in cells(energy)] == ["strategy", "spindle", "sequential", "dp-even", "dp-flops"]
    assert (str(cost.title), str(energy.title)) == ("cost of an iteration", "energy of an iteration")
    (alone,) = compared_tables(request(cluster_of_types({"fast": 1, "slow": 1}), "fast=1"))
    assert str(alone.title) == "test on mixed: an iteration, with more devices"


def test_where_steps_run_sets_of_tasks_the_title_says_what_seconds_are() -> None:
    two = profile_on_types(
        metaop_on_types("a/net", 1, {"fast": 1.0, "slow": 2.0}, batch_size=2),
        metaop_on_types("b/net", 1, {"fast": 1.0, "slow": 2.0}, batch_size=2),
    )
    sets = (TaskShare(tasks=("a",), share=0.5), TaskShare(tasks=("a", "b"), share=0.5))
    result = request(one_of_each(), "fast=1", profile=two.model_copy(update={"task_sets": sets}))
    assert result.task_sets == sets
    assert "50% a; 50% a, b" in str(compared_tables(result)[0].title)


NEEDS_TWO = profile_of(metaop_of("t/net", 2, {2: 0.5, 4: 0.4}))


def test_a_cluster_that_is_too_small_by_itself_is_part_of_the_answer() -> None:
    result = request(cluster_of(1), "cpu=1", profile=NEEDS_TWO)
    assert [row.iteration_s for row in result.as_it_is.strategies] == [None] * 4
    (row,) = result.additions
    assert (row.times_as_fast, row.best_by) == ({}, ("time",))
    assert best_lines(result) == "best by time: spindle with 1 more cpu"
    lines = no_plan_lines(result)
    assert len(lines) == 4 and lines[0].startswith("no plan by spindle with nothing added: t/net: ")
    needs_four = profile_of(metaop_of("t/net", 2, {4: 0.5}))
    with pytest.raises(NoPlanError, match="no plan for 'test', with none of the additions: t/net"):
        request(cluster_of(1), "cpu=1,2", profile=needs_four)


def ask(folder: Path, profile: Profile, cluster: Cluster, *options: object) -> Ended:
    (folder / "profile.json").write_text(profile.model_dump_json(by_alias=True))
    (folder / "cluster.yaml").write_text(cluster.model_dump_json(by_alias=True))
    return run_spindle("compare", folder / "profile.json", "--cluster", folder / "cluster.yaml", *options)


def test_the_command_answers_in_text_and_in_json(tmp_path: Path) -> None:
    text = ask(tmp_path, MIXED, one_of_each(), "--add", "fast=1", "--add", "slow=1,2", "--add", "slow=2")
    assert text.code == ExitCode.DONE
    assert "nothing added   1 more fast   1 more slow   2 more slow" in text.out
    assert "best by time: spindle with 1 more fast: 1.33x as fast as spindle with nothing added" in text.out
    failed, co2 = text.err.splitlines()
    assert failed.startswith(
        "no plan by dp-flops with nothing added, 1 more fast, 1 more slow, 2 more slow: no peak in float32"
    )
    assert co2.startswith("no CO2: ")
    ended = ask(tmp_path, MIXED, one_of_each(co2_grams_per_kwh=1), "--add", "fast=1", "--json")
    document = json.loads(ended.out)
    jsonschema.validate(document, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert document["schema"] == "spindle.compared-additions/1"
    assert document["additions"][0]["best_by"] == ["time"]
    smaller = ask(tmp_path, MIXED, one_of_each(), "--add", "fast=1", "--batch", "t=3", "--json")
    assert json.loads(smaller.out)["as_it_is"]["strategies"][0]["iteration_s"] == pytest.approx(4, rel=NEARLY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--add", "slow"), "--add slow: expected TYPE=N"),
        (("--add", "slow=0"), "--add slow=0: expected TYPE=N with a positive whole number"),
        (("--add", "slow=-1"), "--add slow=-1: expected TYPE=N with a positive whole number"),
        (("--add", "cpu=8"), "--add cpu=8: 'mixed' has no nodes of cpu"),
        (("--add", "slow=70000"), "at most 65536 can be planned for"),
    ],
)
def test_wrong_use_is_one_message(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    ended = ask(tmp_path, MIXED, one_of_each(), *options)
    assert ended.code == ExitCode.USAGE and ended.out == ""
    assert message in ended.err and "internal" not in ended.err


def test_a_profile_without_curves_of_a_type_is_refused(tmp_path: Path) -> None:
    fast_alone = profile_on_types(metaop_on_types("t/net", 2, {"fast": 1.0}, batch_size=6))
    ended = ask(tmp_path, fast_alone, one_of_each(), "--add", "slow=1")
    assert (ended.code, ended.out) == (ExitCode.BAD_INPUT, "")
    assert "devices 'slow', of which the profile has no curves" in ended.err


@pytest.mark.parametrize(("less", "best_by"), [(1e-5, ("time",)), (1e-7, ())])
def test_what_is_hardly_better_is_not(less: float, best_by: tuple[str, ...]) -> None:
    ops = metaop_of("t/net", 4, {1: 1.0, 2: 1.0 - less}, param_bytes_per_op=0)
    (row,) = request(cluster_of(1), "cpu=1", profile=profile_of(ops)).additions
    assert row.strategies[0].iteration_s == pytest.approx(4 - 4 * less, rel=1e-9)
    assert row.best_by == best_by


def test_devices_come_as_whole_nodes() -> None:
    (row,) = request(cluster_of_types({"fast": 2, "slow": 2}), "slow=4").additions
    assert (row.num_added, row.num_nodes, row.num_devices) == (4, 2, 8)
    assert row.of_types == {"fast": 2, "slow": 6}
