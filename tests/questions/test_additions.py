"""Which kind of device to add: plans by hand, whole nodes of the right group, and what is best by what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from helpers.cli import Ended, run_spindle
from helpers.made import made_plan
from helpers.plans import cluster_of, metaop_of, profile_of
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.errors import ExitCode, NoPlanError, UsageError
from spindle_cli.files.cluster import Cluster, NodeGroup
from spindle_cli.profile.types import Device, Profile
from spindle_cli.questions.additions import (
    Wanted,
    additions,
    additions_table,
    best_lines,
    parse_additions,
)
from spindle_cli.questions.edit import with_more_nodes

SCHEMA = Path(__file__).parents[2] / "schemas" / "additions.json"
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


def request(cluster: Cluster, *texts: str, profile: Profile = MIXED) -> tuple[Wanted, ...]:
    return parse_additions(texts, profile, cluster)


def test_each_addition_is_planned_and_paid_by_itself() -> None:
    """One of each: rows 4 + 2, 8 s. Another fast one: 3 + 3, or 3 + 2 + 1, 6 s. Another slow one: the six
    samples do not go faster than 4 + 1 + 1.
    """
    cluster = one_of_each(co2_grams_per_kwh=360)
    result = additions(MIXED, cluster, request(cluster, "fast=1", "slow=1"))
    before, (fast, slow) = result.as_it_is, result.additions
    assert [before.iteration_s, fast.iteration_s, slow.iteration_s] == pytest.approx([8, 6, 8], rel=NEARLY)
    assert [before.price_per_hour, fast.price_per_hour, slow.price_per_hour] == [5400, 9000, 7200]
    assert [before.cost, fast.cost, slow.cost] == pytest.approx([12, 15, 16], rel=NEARLY)
    assert [before.energy_j, fast.energy_j, slow.energy_j] == pytest.approx([3200, 4200, 4000], rel=NEARLY)
    assert [before.co2_g, fast.co2_g, slow.co2_g] == pytest.approx([0.32, 0.42, 0.40], rel=NEARLY)
    assert [fast.speedup, slow.speedup] == pytest.approx([8 / 6, 1], rel=NEARLY)
    assert (fast.best_by, slow.best_by, result.none_better_by) == (("time",), (), ("money", "energy"))
    assert (before.num_devices, fast.num_devices) == (2, 3)
    assert fast.of_types == {"fast": 2, "slow": 1} and slow.of_types == {"fast": 1, "slow": 2}
    assert best_lines(result).splitlines() == [
        "best by time: 1 more fast: 1.33x as fast as without",
        "best by money: nothing added, as no addition is better (1 more fast: an iteration costs 25.0% "
        "more than without)",
        "best by energy: nothing added, as no addition is better (1 more slow: an iteration draws 25.0% "
        "more than without)",
    ]
    marked = list(additions_table(result).columns[-1].cells)
    assert marked == ["money, energy", "time", ""]


def test_an_addition_that_does_not_help_is_not_best_by_time() -> None:
    """A device that takes a hundred seconds a sample gets none of them, or makes all wait."""
    net = metaop_on_types("t/net", 2, {"fast": 1.0, "slow": 100.0}, batch_size=6)
    profile, cluster = profile_on_types(net), one_of_each(slow=0)
    result = additions(profile, cluster, request(cluster, "slow=1,2", profile=profile))
    assert result.as_it_is.iteration_s is not None
    assert all((row.iteration_s or 0) >= result.as_it_is.iteration_s for row in result.additions)
    assert result.none_better_by == ("time", "money", "energy")
    assert all(row.best_by == () for row in result.additions)
    assert (
        best_lines(result)
        .splitlines()[0]
        .startswith("best by time: nothing added, as no addition is better (1 more slow")
    )


def test_what_is_added_may_pay_for_itself() -> None:
    """Two slow devices for nothing: rows 3 + 1 + 1 + 1, 6 s at 1 a second instead of 8."""
    cluster = one_of_each(slow=0)
    (row,) = (result := additions(MIXED, cluster, request(cluster, "slow=2"))).additions
    assert row.cost == pytest.approx(6, rel=NEARLY)
    assert "best by money: 2 more slow: an iteration costs 25.0% less than without" in best_lines(result)


def test_an_addition_says_its_nodes_and_the_memory_of_the_fullest_device() -> None:
    cluster = cluster_of_types({"fast": 2, "slow": 2})
    (row,) = additions(MIXED, cluster, request(cluster, "slow=4")).additions
    assert (row.num_added, row.num_nodes, row.num_devices) == (4, 2, 8)
    assert row.of_types == {"fast": 2, "slow": 6}
    plan = made_plan(MIXED, one_of_each())
    needs = plan.predicted.peak_memory_bytes
    before = additions(MIXED, one_of_each(), ()).as_it_is
    assert before.peak_memory_bytes == max(needs) > min(needs)


def test_equally_good_additions_are_both_best_and_what_is_not_known_has_no_best() -> None:
    alone = profile_of(metaop_of("t/net", 4, {1: 1.0, 2: 0.5, 3: 0.4}, batch_size=6))
    groups = tuple(NodeGroup(name=name, devices=1, device="cpu", memory_gib=4) for name in "ab")
    cluster = cluster_of(2).changed(nodes=groups)
    result = additions(alone, cluster, request(cluster, "a=1", "b=1", profile=alone))
    assert [row.best_by for row in result.additions] == [("time",), ("time",)]
    assert best_lines(result).startswith("best by time: 1 more a (cpu) or 1 more b (cpu): 1.")
    headers = [column.header for column in additions_table(result).columns]
    assert headers == ["added", "devices", "iteration", "speed-up", "peak memory", "best by"]


def test_one_price_for_all_counts_for_what_is_added_too() -> None:
    cluster = one_of_each()
    result = additions(MIXED, cluster, request(cluster, "fast=1"), price_per_device_hour=3600)
    assert result.price_per_device_hour == 3600
    assert result.as_it_is.price_per_hour == 7200
    assert result.additions[0].cost == pytest.approx(3 * 6, rel=NEARLY)


def uneven() -> Cluster:
    """Two nodes of 2 fast devices, called quick; of slow ones a node of 3, called wide, and one of 2."""
    groups = (
        NodeGroup(name="quick", count=2, devices=2, device="fast", memory_gib=4000),
        NodeGroup(name="wide", devices=3, device="slow", memory_gib=4000),
        NodeGroup(name="fast", devices=2, device="slow", memory_gib=4000),
    )
    return cluster_of_types({"fast": 1}).changed(nodes=groups)


def test_devices_come_as_whole_nodes_of_the_last_group_that_they_fill() -> None:
    cluster = uneven()
    assert request(cluster, "slow=3") == (Wanted(1, 3),)
    assert request(cluster, "slow=4") == (Wanted(2, 4),)
    assert request(cluster, "slow=6") == (Wanted(2, 6),)  # two of 3, or three of 2
    assert request(cluster, "wide=6") == (Wanted(1, 6),)
    assert request(cluster, "fast=2") == (Wanted(2, 2),)  # a name goes before a type
    assert request(cluster, "wide=6,3", "slow=3") == (Wanted(1, 6), Wanted(1, 3))
    grown = with_more_nodes(cluster, 1, 2)
    assert grown.node_sizes == (2, 2, 3, 3, 3, 2)
    assert grown.type_of == ("fast",) * 4 + ("slow",) * 11
    assert grown.name == "mixed, 6 more wide"


@pytest.mark.parametrize(
    "text", ["slow", "slow=", "=8", "slow=0", "slow=-2", "slow=1.5", "slow=2,", "slow=x", "slow=²"]
)
def test_what_is_no_addition_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--add .*: expected TYPE=N .*for example --add slow=1$"):
        request(one_of_each(), text)


def test_parts_of_nodes_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"--add slow=5: a node of slow in 'mixed' has 3 or 2 devices; expected"
    ):
        request(uneven(), "slow=5")
    with pytest.raises(UsageError, match=r"--add wide=4: a node of wide in 'mixed' has 3 devices"):
        request(uneven(), "wide=4")


def test_as_many_devices_as_can_be_planned_for_and_no_more() -> None:
    assert request(one_of_each(), f"slow={2**16 - 2}") == (Wanted(1, 2**16 - 2),)
    with pytest.raises(UsageError, match="65537 devices together; at most 65536"):
        request(one_of_each(), f"slow={2**16 - 1}")


def test_a_type_that_the_cluster_does_not_have_is_refused_with_what_to_do() -> None:
    only_fast = cluster_of_types({"fast": 1})
    with pytest.raises(UsageError, match=r"'mixed' has no nodes of slow, .*; it has fast\n") as raised:
        request(only_fast, "slow=1")
    hint = raised.value.hint or ""
    assert hint.startswith("The profile has its curves: write a second cluster file") and "compare" in hint
    with pytest.raises(
        UsageError, match=r"it has fast \(group quick\), slow \(group wide\), slow \(group fast\)"
    ) as raised:
        request(uneven(), "h20=1")
    assert "no curves of it either: profile on one, or for it with --estimate" in (raised.value.hint or "")
    h20 = Device(type="cuda", name="NVIDIA H20", memory_bytes=2**30)
    with pytest.raises(UsageError) as raised:
        request(only_fast, "h20-96gb=1", profile=MIXED.model_copy(update={"devices": (), "device": h20}))
    assert "has its curves" in (raised.value.hint or "")


NEEDS_TWO = profile_of(metaop_of("t/net", 2, {2: 0.5, 4: 0.4}))


def test_a_cluster_that_is_too_small_by_itself_is_part_of_the_answer() -> None:
    cluster = cluster_of(1)
    result = additions(NEEDS_TWO, cluster, request(cluster, "cpu=1", profile=NEEDS_TWO))
    assert result.as_it_is.iteration_s is None and "t/net" in (result.as_it_is.failure or "")
    assert result.additions[0].speedup is None and result.additions[0].best_by == ("time",)
    assert best_lines(result) == "best by time: 1 more cpu"
    with pytest.raises(NoPlanError, match="no plan for 'test', with none of the additions"):
        needs_four = profile_of(metaop_of("t/net", 2, {4: 0.5}))
        additions(needs_four, cluster, request(cluster, "cpu=1,2", profile=needs_four))


def ask(folder: Path, profile: Profile, cluster: Cluster, *options: object) -> Ended:
    (folder / "profile.json").write_text(profile.model_dump_json(by_alias=True))
    (folder / "cluster.yaml").write_text(cluster.model_dump_json(by_alias=True))
    return run_spindle("sweep", folder / "profile.json", "--cluster", folder / "cluster.yaml", *options)


def test_the_command_answers_in_text_and_in_json(tmp_path: Path) -> None:
    options = ("--add", "fast=1", "--add", "slow=1,2")
    text = ask(tmp_path, MIXED, one_of_each(), *options)
    assert text.code == ExitCode.DONE
    rows = [line.split()[:2] for line in text.out.splitlines()]
    assert [row for row in rows if row and row[-1] in ("fast", "slow")] == [
        ["1", "fast"],
        ["1", "slow"],
        ["2", "slow"],
    ]
    assert "best by money: nothing added, as no addition is better (1 more fast" in text.out
    assert (
        text.err == "no CO2: 'mixed' says no co2_grams_per_kwh, the grams of CO2 of a kWh where it stands\n"
    )
    ended = ask(tmp_path, MIXED, one_of_each(co2_grams_per_kwh=1), *options, "--json")
    assert (ended.code, ended.err) == (ExitCode.DONE, "")
    document = json.loads(ended.out)
    jsonschema.validate(document, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert document["schema"] == "spindle.additions/1"
    assert [(row["group"], row["num_added"]) for row in document["additions"]] == [
        ("fast", 1),
        ("slow", 1),
        ("slow", 2),
    ]


def test_the_command_says_what_is_missing_and_what_has_no_plan(tmp_path: Path) -> None:
    ended = ask(tmp_path, NEEDS_TWO, cluster_of(1), "--add", "cpu=1")
    assert ended.code == ExitCode.DONE
    failed, cost, energy = ended.err.splitlines()
    assert failed.startswith("no plan with nothing added: ") and "t/net" in failed
    assert cost.startswith("no cost: 'test' says no price of cpu") and energy.startswith("no energy: ")
    assert ask(tmp_path, NEEDS_TWO, cluster_of(1), "--add", "cpu=1", "--strategy", "dp-even").code == (
        ExitCode.NO_PLAN
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--add", "slow=1", "--devices", "1,2"), "--add and --devices: they are two questions"),
        (("--add", "slow"), "--add slow: expected TYPE=N"),
        (("--add", "cpu=8"), "--add cpu=8: 'mixed' has no nodes of cpu"),
        (("--devices", "²"), "--devices ²: expected positive whole numbers"),
        (("--devices", "9" * 5000), "expected positive whole numbers"),
        (("--batch", "t=²"), "--batch t=²: expected TASK=SIZE"),
    ],
)
def test_wrong_use_is_one_message(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    ended = ask(tmp_path, MIXED, one_of_each(), *options)
    assert ended.code == ExitCode.USAGE and ended.out == ""
    assert message in ended.err and "internal" not in ended.err
