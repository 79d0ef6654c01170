"""What outer steps of islands take at other settings, against formulas by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from helpers.cli import run_spindle
from helpers.island_plans import on_islands
from helpers.made import made_plan
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from spindle_cli.errors import ExitCode
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.islands.said import OtherSettings, OuterSteps, other_settings
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import LocalSgd
from spindle_cli.questions.explain import explain, islands_table, islands_text

SCHEMA = Path(__file__).parents[2] / "schemas" / "explanation.json"
MIB = 2**20
# Two devices behind one card send 3 MiB each in 32 bits, at 1 GB/s and 20 us.
OUTER_S = {32: 20e-6 + 6 * MIB / 1e9, 16: 20e-6 + 3 * MIB / 1e9, 8: 20e-6 + 1.5 * MIB / 1e9}
INNER_S = 0.1


def planned(without_s: float | None = None, *, accumulate: int = 1, **settings: Any) -> Plan:
    """An op of 3 MiB, all of which both devices of an island have, in an iteration of 0.1 s."""
    metaop = metaop_of("a/x", 1, {1: 0.2, 2: 0.1}, param_bytes_per_op=3 * MIB)
    plan = plan_of(profile_of(metaop), cluster_of(2), [(slice_of(metaop, (0, 1), (0, 1), 0.0),)])
    predicted = plan.predicted.model_copy(update={"iteration_s": INNER_S})
    more = {"predicted": predicted, "optimizer_s_per_byte": 0.0, "accumulate": accumulate}
    plan = on_islands(plan.model_copy(update=more), LocalSgd(**{"islands": 2, "every": 30, **settings}))
    assert plan.islands is not None
    return plan.model_copy(update={"islands": plan.islands.model_copy(update={"without_s": without_s})})


def settings_of(plan: Plan) -> OtherSettings:
    found = other_settings(plan)
    assert found is not None
    return found


def test_the_time_and_the_bytes_of_every_setting() -> None:
    found = settings_of(planned(0.104, bits=16))
    assert (found.islands, found.every, found.bits, found.inner_s) == (2, 30, 16, INNER_S)
    assert [each.bits for each in found.of_bits] == [32, 16, 8]
    for each in found.of_bits:
        assert each.outer_step_s == pytest.approx(OUTER_S[each.bits], rel=1e-12)
        assert each.outer_step_bytes == 3 * MIB * each.bits // 32
        assert [row.every for row in each.steps] == [1, 10, 30, 50, 100, 200, 500, 1000]
        for row in each.steps:
            mean_s = INNER_S + OUTER_S[each.bits] / row.every
            assert row.iteration_s == pytest.approx(mean_s, rel=1e-12)
            assert row.bytes_per_iteration == each.outer_step_bytes / row.every
            assert row.saved_s == pytest.approx(0.104 - mean_s, rel=1e-9)
            of_every_step_s = INNER_S + OUTER_S[each.bits] - mean_s
            assert row.saved_to_every_step_s == pytest.approx(of_every_step_s, abs=1e-12)


def own_row(plan: Plan) -> OuterSteps:
    assert plan.local_sgd is not None
    found = settings_of(plan)
    (rows,) = [each.steps for each in found.of_bits if each.bits == plan.local_sgd.bits]
    (row,) = [row for row in rows if row.every == plan.local_sgd.every]
    return row


@pytest.mark.parametrize("settings", [{"every": 100}, {"bits": 8}, {"every": 7, "bits": 16, "islands": 4}])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_plan_s_own_row_is_what_the_plan_predicts(settings: dict[str, Any], accumulate: int) -> None:
    plan = planned(0.2, accumulate=accumulate, **settings)
    assert plan.islands is not None and plan.local_sgd is not None
    row = own_row(plan)
    assert row.iteration_s == pytest.approx(plan.mean_iteration_s, rel=1e-12)
    assert row.saved_s == pytest.approx(0.2 - plan.mean_iteration_s, rel=1e-12)
    iterations = plan.local_sgd.every * accumulate
    assert row.bytes_per_iteration == max(plan.islands.outer_step_bytes) / iterations
    assert settings_of(plan).step_iterations == accumulate


def test_from_which_number_of_steps_on_islands_save_time() -> None:
    """An outer step of 6.31, 3.17 or 1.59 ms, and 1 ms saved in each iteration without: 7, 4 and 2."""
    assert [each.saves_from for each in settings_of(planned(INNER_S + 1e-3)).of_bits] == [7, 4, 2]
    # of steps of two iterations
    twice = settings_of(planned(INNER_S + 1e-3, accumulate=2))
    assert [each.saves_from for each in twice.of_bits] == [4, 2, 1]
    for without_s in (INNER_S, INNER_S / 2, None):
        assert [each.saves_from for each in settings_of(planned(without_s)).of_bits] == [None] * 3


def test_the_device_that_sends_most_counts() -> None:
    """Device 1 has a MetaOp of 2 MiB alone besides what both have."""
    both = metaop_of("a/x", 1, {2: 0.1}, param_bytes_per_op=3 * MIB)
    alone = metaop_of("b/y", 1, {1: 0.1}, param_bytes_per_op=2 * MIB)
    slices = [(slice_of(both, (0, 1), (0, 1), 0.0),), (slice_of(alone, (0, 1), (1,), 0.1),)]
    plan = on_islands(plan_of(profile_of(both, alone), cluster_of(2), slices), LocalSgd(islands=2, every=10))
    assert [each.outer_step_bytes for each in settings_of(plan).of_bits] == [
        5 * MIB,
        5 * MIB // 2,
        5 * MIB // 4,
    ]


def text_of(plan: Plan) -> tuple[list[list[str]], str]:
    """The cells of the table by row, with its title first, and the lines below."""
    table = islands_table(settings_of(plan))
    assert not isinstance(table, str)
    rows = zip(*(list(column.cells) for column in table.columns), strict=True)
    return [[str(table.title)], *map(list, rows)], islands_text(settings_of(plan))


def test_that_is_told_as_a_table() -> None:
    rows, text = text_of(planned(INNER_S + 1e-3, bits=16))
    assert rows[0][0].startswith("outer steps of 2 islands: ")
    assert rows[0][0].endswith("what it saves against summing in every step")
    assert rows[1][:4] == ["1", "106 ms", "3 MiB", "-5.31 ms"]
    assert rows[3] == [
        *("30", "100 ms", "102 KiB", "790 us"),
        *("100 ms", "51.2 KiB", "894 us"),
        *("100 ms", "25.6 KiB", "947 us"),
        "<- the plan, in 16 bits",
    ]
    assert [row[-1] for row in rows[1:]].count("") == 7
    assert text.splitlines()[:2] == [
        "an iteration takes 100 ms without outer steps, 101 ms with gradients summed over all devices",
        "islands save time if `every` is at least 7 in 32 bits, 4 in 16 bits, 2 in 8 bits",
    ]
    assert "so the workload file says them (train.local_sgd)" in text


def test_what_is_not_known_or_not_saved_is_said() -> None:
    rows, text = text_of(planned())
    assert rows[0][0].endswith("against an outer step after every step")
    assert rows[1][3] == "0 s" and rows[2][3] == "5.68 ms"
    assert "in every step there is no plan" in text and "save" not in text
    _, text = text_of(planned(INNER_S / 2))
    assert "islands save no time, however seldom they average" in text


def test_a_plan_without_islands_has_no_such_table() -> None:
    profile = profile_of(metaop_of("a/x", 1, {1: 0.2, 2: 0.1}))
    found = explain(made_plan(profile, cluster_of(2)), None, plan_name="plan.yaml")
    assert (found.islands, found.outer_steps) == (1, None)
    assert (islands_table(None), islands_text(None)) == ("", "")


def test_the_command_tells_it_without_a_profile(tmp_path: Path) -> None:
    metaop = metaop_of("a/x", 4, {1: 0.4, 2: 0.2}, batch_size=8, param_bytes_per_op=3 * MIB)
    profile = profile_of(metaop).model_copy(update={"local_sgd": LocalSgd(islands=2, every=20)})
    path = tmp_path / "plan.yaml"
    write_plan(path, made_plan(profile, cluster_of(4, devices_per_node=2)))
    text = run_spindle("explain", path)
    assert (text.code, text.err) == (ExitCode.DONE, "")
    assert "on 2 devices of each of 2 islands" in text.out
    assert "<- the plan, in 32 bits" in text.out and "islands save" in text.out
    document = json.loads(run_spindle("explain", path, "--json").out)
    jsonschema.validate(document, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert (document["islands"], document["outer_steps"]["every"]) == (2, 20)


def test_islands_that_are_not_in_the_cluster_are_told_and_not_counted(tmp_path: Path) -> None:
    plan = planned(0.2)
    assert plan.islands is not None
    lost = plan.islands.model_copy(update={"cluster": cluster_of(2)})
    path = tmp_path / "plan.yaml"
    write_plan(path, plan.model_copy(update={"islands": lost}))
    ended = run_spindle("explain", path)
    assert ended.code == ExitCode.DONE and "outer steps" not in ended.out
    assert "Traceback" not in ended.err and "check" in ended.err
