"""What an iteration costs and draws: money, joules and grams of CO2, each by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import Ended, run_spindle
from helpers.made import made_plan
from helpers.plans import cluster_of, metaop_of, profile_of, two_towers
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.costs.flops import board_watts
from spindle_cli.errors import ExitCode, InputError, UsageError
from spindle_cli.files.cluster import Cluster, NodeGroup
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import TaskShare
from spindle_cli.questions.compare import compare, spending_table
from spindle_cli.questions.edit import with_devices, with_one_more
from spindle_cli.questions.spending import Spending, known_figures, spending_of, unknown
from spindle_cli.questions.sweep import sweep, sweep_table
from spindle_cli.units import format_grams, format_joules

A = {"price_per_device_hour": 3.6, "watts_per_device": 100, "idle_watts_per_device": 10}
B = {"price_per_device_hour": 7.2, "watts_per_device": 200, "idle_watts_per_device": 50}


def one_and_three(a: dict[str, float] = A, b: dict[str, float] = B, **more: Any) -> Cluster:
    """One device of one group and three of another."""
    nodes = (
        NodeGroup(name="a", devices=1, device="cpu", memory_gib=4, **a),
        NodeGroup(name="b", count=3, devices=1, device="cpu", memory_gib=4, **b),
    )
    return cluster_of(4).changed(nodes=nodes, **more)


def plan_on(cluster: Cluster) -> Plan:
    """`two_towers`, whose schedule is 3.8 s, in an iteration of 4 s.

    Busy: device 0 3.8 s, device 1 3.6 s, devices 2 and 3 2.1 s; those of group b wait 0.2 + 1.7 + 1.7 s.
    """
    plan = two_towers()[1]
    predicted = plan.predicted.model_copy(update={"iteration_s": 4.0})
    return plan.model_copy(update={"cluster": cluster, "predicted": predicted})


def test_an_iteration_takes_price_and_watts_of_each_group_s_devices() -> None:
    found = spending_of(plan_on(one_and_three(co2_grams_per_kwh=500)))
    assert found.price_per_hour == pytest.approx(3.6 + 3 * 7.2)
    assert found.cost == pytest.approx(25.2 * 4 / 3600)
    assert found.energy_j == pytest.approx(100 * 4 + 200 * 4 * 3 - 150 * 3.6)
    assert found.co2_g == pytest.approx(2260 / 3.6e6 * 500)


def test_devices_wait_in_the_group_that_they_are_of() -> None:
    """With the three nodes first, those wait 0 + 0.2 + 1.7 s, and the one behind them 1.7 s."""
    groups = one_and_three().nodes
    cluster = one_and_three().changed(nodes=groups[::-1])
    expected = (200 * 4 * 3 - 150 * 1.9) + (100 * 4 - 90 * 1.7)
    assert spending_of(plan_on(cluster)).energy_j == pytest.approx(expected)


def test_a_device_may_draw_as_much_while_it_waits() -> None:
    same = {"watts_per_device": 100.0, "idle_watts_per_device": 100.0}
    assert spending_of(plan_on(one_and_three(same, same))).energy_j == pytest.approx(4 * 100 * 4)


def test_devices_of_which_nothing_else_is_said_draw_as_much_while_they_wait() -> None:
    b = {"watts_per_device": 200.0}
    assert spending_of(plan_on(one_and_three(b=b))).energy_j == pytest.approx(100 * 4 + 200 * 4 * 3)


def test_one_price_for_all_takes_the_place_of_the_groups() -> None:
    found = spending_of(plan_on(one_and_three()), price_per_device_hour=9.0)
    assert found.price_per_hour == 36.0
    assert found.cost == pytest.approx(36 * 4 / 3600)
    assert spending_of(plan_on(one_and_three()), price_per_device_hour=0.0).cost == 0.0


def test_what_is_not_known_of_one_group_is_not_told_of_all() -> None:
    found = spending_of(plan_on(one_and_three(b={}, co2_grams_per_kwh=500)))
    assert found == Spending()
    assert spending_of(plan_on(one_and_three())).co2_g is None
    assert unknown(one_and_three()) == ()
    cost, energy = unknown(one_and_three(b={}))
    assert "no price of b;" in cost and "for b;" in energy
    assert unknown(one_and_three({}, {})) == ()
    assert len(unknown(one_and_three({}, {}), wanted=True)) == 2
    assert [each.partition(":")[0] for each in unknown(one_and_three(), wanted=True)] == ["no CO2"]
    assert unknown(one_and_three(b={"watts_per_device": 3}), price_per_device_hour=1) == ()
    # Grams ask for watts.
    (energy,) = unknown(one_and_three({}, {}, co2_grams_per_kwh=500))
    assert energy.startswith("no energy: no board power is listed for a, b;")


def test_a_type_draws_its_board_power_unless_its_group_says_otherwise() -> None:
    assert board_watts("a100-80gb") == board_watts("A800") == 400
    assert board_watts("h20-96gb") == 400 and board_watts("h200-141gb") == 700
    assert board_watts("p100-16gb") == 300 and board_watts("p100-pcie-16gb") == 250
    assert board_watts("h100-pcie") is None and board_watts("cpu") is None
    plan = plan_on(cluster_of_types({"a100-80gb": 1, "v100-32gb": 3}))
    assert spending_of(plan).energy_j == pytest.approx((400 + 3 * 300) * 4)


def test_steps_that_run_sets_of_tasks_take_the_mean() -> None:
    """Three of four steps run one task: 4 devices at 100 W, 40 W while they wait."""
    two = profile_of(
        metaop_of("big/net", 6, {1: 0.04, 2: 0.02, 4: 0.01}), metaop_of("small/net", 2, {1: 0.01})
    )
    sets = (TaskShare(tasks=("small",), share=0.75), TaskShare(tasks=("big", "small"), share=0.25))
    nodes = (
        NodeGroup(devices=4, device="cpu", memory_gib=4, watts_per_device=100, idle_watts_per_device=40),
    )
    plan = made_plan(two.model_copy(update={"task_sets": sets}), cluster_of(4).changed(nodes=nodes))
    total = 0.0
    for share, tasks in ((0.75, ("small",)), (0.25, ("big", "small"))):
        own = plan.set_plans[tasks]
        busy_s = sum(piece.busy_s * len(piece.devices) for piece in own.slices)
        waits_s = 4 * own.predicted.compute_s - busy_s
        total += share * (4 * own.predicted.iteration_s * 100 - waits_s * 60)
    assert spending_of(plan).energy_j == pytest.approx(total)
    assert spending_of(plan, 3600).cost == pytest.approx(4 * plan.mean_iteration_s)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"price_per_device_hour": -1}, r"price_per_device_hour: .*greater than or equal to 0"),
        ({"price_per_device_hour": 2e9}, r"price_per_device_hour: .*less than or equal to 1000000000"),
        ({"price_per_device_hour": "cheap"}, "price_per_device_hour: .*'cheap'"),
        ({"price_per_device_hour": True}, "expected a number, not true or false"),
        ({"watts_per_device": 0}, r"watts_per_device: .*greater than 0"),
        ({"watts_per_device": True}, "expected a number, not true or false"),
        ({"idle_watts_per_device": 5}, "5 without watts_per_device; expected both"),
        ({"watts_per_device": 5, "idle_watts_per_device": 5.5}, "5.5; expected at most watts_per_device, 5"),
        ({"watts_per_device": 5, "idle_watts_per_device": -1}, "greater than or equal to 0"),
        ({"watts_per_device": 5, "idle_watts_per_device": True}, "expected a number, not true or false"),
    ],
)
def test_wrong_prices_and_watts_are_refused(group: dict[str, Any], message: str) -> None:
    data = json.loads(cluster_of(2).model_dump_json(by_alias=True))
    data["nodes"][0].update(group)
    with pytest.raises(InputError, match=message):
        Cluster.from_data(data, where="c.yaml")


@pytest.mark.parametrize("grams", [-1, True, "much", 2e6])
def test_wrong_grams_are_refused(grams: object) -> None:
    data = json.loads(cluster_of(2).model_dump_json(by_alias=True)) | {"co2_grams_per_kwh": grams}
    with pytest.raises(InputError, match="co2_grams_per_kwh"):
        Cluster.from_data(data, where="c.yaml")


def test_other_sizes_of_a_cluster_keep_what_it_says() -> None:
    cluster = one_and_three(co2_grams_per_kwh=500, backend="gloo")
    for other in (with_devices(cluster, 3), with_devices(cluster, 6), with_one_more(cluster, "cpu")):
        assert (other.co2_grams_per_kwh, other.backend) == (500, "gloo")
        assert {group.price_per_device_hour for group in other.nodes} == {3.6, 7.2}
    assert cluster.without_host_link().co2_grams_per_kwh == 500


def test_energy_and_weights_for_people() -> None:
    shown = [format_joules(value) for value in (0, 2e-7, 0.0125, 1, 999.4, 999.6, 1234, 9.996e5, 5e9)]
    assert shown == ["0 J", "0.2 uJ", "12.5 mJ", "1 J", "999 J", "1 kJ", "1.23 kJ", "1 MJ", "5,000 MJ"]
    assert [format_grams(value) for value in (0.071, 1e3, 1.5e6)] == ["71 mg", "1 kg", "1,500 kg"]


# Two types, one twice as fast.
NET = metaop_on_types("t/net", 2, {"fast": 1.0, "slow": 2.0}, batch_size=6)
MIXED = profile_on_types(NET)


def mixed_cluster(**more: Any) -> Cluster:
    cluster = cluster_of_types({"fast": 1, "slow": 1})
    groups = [
        group.model_copy(update={"price_per_device_hour": price, "watts_per_device": watts})
        for group, price, watts in zip(cluster.nodes, (3600.0, 1800.0), (300.0, 100.0), strict=True)
    ]
    return cluster.changed(nodes=tuple(groups), **more)


def test_a_sweep_over_several_types_says_which_devices_and_what_they_take() -> None:
    """One fast device takes 12 s; with the slow one it does 4 of 6 samples: 8 s."""
    result = sweep(MIXED, mixed_cluster(co2_grams_per_kwh=3.6e5), (2, 1))
    one, two = result.points
    assert (one.of_types, two.of_types) == ({"fast": 1}, {"fast": 1, "slow": 1})
    assert one.iteration_s is not None and one.iteration_s == pytest.approx(12, rel=1e-3)
    assert two.iteration_s is not None and two.iteration_s == pytest.approx(8, rel=1e-3)
    assert one.cost == pytest.approx(one.iteration_s) and two.cost == pytest.approx(1.5 * two.iteration_s)
    assert one.energy_j == pytest.approx(300 * one.iteration_s)
    assert two.energy_j == pytest.approx(400 * two.iteration_s)
    assert two.energy_j is not None and two.co2_g == pytest.approx(two.energy_j / 10)
    headers = [column.header for column in sweep_table(result).columns]
    assert headers[:2] == ["devices", "of types"] and headers[5:8] == ["cost", "energy", "CO2"]


def test_a_sweep_beyond_a_cluster_of_several_types_is_refused() -> None:
    with pytest.raises(UsageError, match="has 2 devices, of several types") as raised:
        sweep(MIXED, mixed_cluster(), (1, 3))
    assert raised.value.hint is not None and "--add slow=N" in raised.value.hint
    alone = profile_of(metaop_of("t/net", 1, {1: 1.0, 2: 0.5}))
    assert [point.of_types for point in sweep(alone, cluster_of(1), (2,)).points] == [{}]


def test_compare_says_what_each_strategy_takes() -> None:
    comparison = compare(MIXED, mixed_cluster())
    rows = {row.strategy: row for row in comparison.strategies}
    even = rows["dp-even"]
    assert even.iteration_s == pytest.approx(12, rel=1e-3)  # three samples of 2 s, twice
    assert even.iteration_s is not None and even.cost == pytest.approx(1.5 * even.iteration_s)
    assert even.energy_j == pytest.approx(400 * even.iteration_s)
    table = spending_table(comparison)
    assert table is not None and [column.header for column in table.columns] == ["strategy", "cost", "energy"]
    assert spending_table(compare(MIXED, cluster_of_types({"fast": 1, "slow": 1}))) is None


def test_columns_are_of_what_some_row_has() -> None:
    rows = (Spending(), Spending(energy_j=0.0))
    assert [(figure.title, figure.cell(rows[1]), figure.cell(rows[0])) for figure in known_figures(rows)] == [
        ("energy", "0 J", "")
    ]


def ask(folder: Path, command: str, cluster: Cluster, *options: object) -> Ended:
    (folder / "profile.json").write_text(MIXED.model_dump_json(by_alias=True))
    (folder / "cluster.yaml").write_text(cluster.model_dump_json(by_alias=True))
    return run_spindle(command, folder / "profile.json", "--cluster", folder / "cluster.yaml", *options)


def test_the_commands_tell_it(tmp_path: Path) -> None:
    swept = ask(tmp_path, "sweep", mixed_cluster(co2_grams_per_kwh=400), "--json")
    document = json.loads(swept.out)
    assert (swept.code, swept.err) == (ExitCode.DONE, "")
    assert [point["of_types"] for point in document["points"]] == [{"fast": 1}, {"fast": 1, "slow": 1}]
    assert all(point["co2_g"] > 0 and point["price_per_hour"] > 0 for point in document["points"])
    compared = ask(tmp_path, "compare", mixed_cluster())
    assert compared.code == ExitCode.DONE and "of an iteration" in compared.out
    nodes = mixed_cluster().nodes
    half = mixed_cluster().changed(
        nodes=(nodes[0], nodes[1].model_copy(update={"price_per_device_hour": None}))
    )
    for command in ("compare", "sweep"):
        assert (
            "no cost: 'mixed' says no price of slow; expected price_per_" in ask(tmp_path, command, half).err
        )
    assert ask(tmp_path, "sweep", half, "--price", 1).err == ""


@pytest.mark.parametrize(
    "options", [("--price", "inf"), ("--price", "nan"), ("--price", "-1"), ("--devices", 70000)]
)
def test_no_price_and_no_number_beyond_reason(tmp_path: Path, options: tuple[object, ...]) -> None:
    ended = ask(tmp_path, "sweep", cluster_of_types({"fast": 1}), *options)
    assert ended.code == ExitCode.USAGE and "internal" not in ended.err
