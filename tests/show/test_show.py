"""The picture of a plan: what each row and bar says, with and without colour, on few and on many devices."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from helpers.cli import run_spindle
from helpers.cut import cuttable
from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of, two_towers
from helpers.uneven import uneven_plan
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.reasons import reasons
from spindle_cli.plan.types import Plan
from spindle_cli.questions.explain import explain
from spindle_cli.questions.explain import headline as headline_of_reasons
from spindle_cli.show.grid import make_grid
from spindle_cli.show.picture import BAR, IDLE, Symbols, allocation_table, draw, headline, legend
from spindle_cli.show.summary import Allocation, summarise


def staggered(num_devices: int) -> Plan:
    """Every device runs one op of its own MetaOp, starting a little later than the device before it."""
    metaops = [metaop_of(f"task{i % 5}/layer{i}", 1, {1: 1.0}) for i in range(num_devices)]
    pieces = [slice_of(metaop, (0, 1), (i,), i / num_devices) for i, metaop in enumerate(metaops)]
    return plan_of(profile_of(*metaops), cluster_of(num_devices), [pieces])


def rows_of(text: str) -> list[str]:
    return text.splitlines()[2:]


def test_rows_columns_and_use_of_a_plan_solved_by_hand() -> None:
    grid = make_grid(two_towers()[1], columns=38, max_rows=10)  # a tenth of a second a column
    vision, text, wide, loss = range(4)
    assert [row.devices for row in grid.rows] == [(0,), (1,), (2, 3)]
    assert grid.rows[0].cells == (vision,) * 30 + (wide,) * 6 + (loss,) * 2
    assert grid.rows[1].cells == (vision,) * 30 + (wide,) * 6 + (None,) * 2
    assert grid.rows[2].cells == (text,) * 15 + (None,) * 15 + (wide,) * 6 + (None,) * 2
    assert [row.used for row in grid.rows] == pytest.approx([1.0, 3.6 / 3.8, 2.1 / 3.8])


def test_the_picture_reads_without_colour() -> None:
    lines = rows_of(draw(two_towers()[1], width=80, max_rows=10).plain)
    assert lines[0].startswith("0")
    assert "a vision[0:3] " + BAR in lines[0]
    assert lines[2].startswith("2,3")
    assert "b text[0:3] " in lines[2]
    assert IDLE * 10 in lines[2]
    assert lines[0].endswith("100%")
    assert lines[2].endswith(" 55%")


def test_each_task_has_its_colour_and_the_legend_names_it() -> None:
    plan = staggered(10)
    colours = Symbols.of(plan).colour
    assert len(set(colours.values())) == len(colours) == 5
    console = Console(force_terminal=True, color_system="256", width=80)
    with console.capture() as capture:
        console.print(legend(plan))
    assert all(task in capture.get() for task in colours)
    assert "\x1b[" in capture.get()


@pytest.mark.parametrize("num_devices", [64, 1024])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_many_devices_fit_the_rows_and_the_width(num_devices: int, width: int) -> None:
    text = draw(staggered(num_devices), width=width, max_rows=48).plain
    assert max(map(len, text.splitlines())) <= width
    assert len(rows_of(text)) <= 48 + 1
    assert text.splitlines()[-1].startswith("~")


@pytest.mark.parametrize(("num_devices", "max_rows"), [(64, 48), (1024, 48), (1024, 1), (7, 3)])
def test_every_device_is_in_exactly_one_row(num_devices: int, max_rows: int) -> None:
    rows = make_grid(staggered(num_devices), columns=50, max_rows=max_rows).rows
    assert len(rows) <= max_rows
    assert sorted(device for row in rows for device in row.devices) == list(range(num_devices))
    assert all(not row.exact for row in rows if len(row.devices) > 1)


def test_devices_that_run_the_same_share_a_row_wherever_they_are() -> None:
    wide, narrow = metaop_of("a/x", 1, {2: 1.0}), metaop_of("b/x", 1, {2: 1.0})
    pieces = [slice_of(wide, (0, 1), (0, 3), 0.0), slice_of(narrow, (0, 1), (1, 2), 0.0)]
    rows = make_grid(plan_of(profile_of(wide, narrow), cluster_of(5), [pieces]), 10, 10).rows
    assert [row.devices for row in rows] == [(0, 3), (1, 2), (4,)]
    assert rows[2].cells == (None,) * 10


def test_the_summary_counts_ops_by_allocation_and_time_by_device() -> None:
    report = summarise(two_towers()[1])
    vision = report.metaops[0]
    assert vision.allocations == (Allocation(num_ops=1, dp=4, tp=1), Allocation(num_ops=3, dp=2, tp=1))
    assert vision.device_s == pytest.approx(2 * 3.0 + 4 * 0.6)
    assert report.gap == pytest.approx(3.8 / 2.8 - 1)
    assert report.device_use == pytest.approx((1.0, 3.6 / 3.8, 2.1 / 3.8, 2.1 / 3.8))


def test_the_command_prints_picture_table_and_prediction(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(path, two_towers()[1])
    ended = run_spindle("show", path)
    assert ended.code == 0
    assert "35.7% above the lower bound 2.8 s" in ended.out
    assert re.search(r"a +pairs/vision +4 +8 +1 on 4, 3 on 2", ended.out)
    assert "devices busy 76% of the schedule" in ended.out
    assert "\x1b" not in ended.out
    assert max(map(len, ended.out.splitlines())) <= 120


def test_a_rank_s_program_has_an_action_a_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(path, two_towers()[1])
    ended = run_spindle("show", path, "--rank", 2)
    lines = ended.out.splitlines()
    assert any("F 1 " in line and "pairs/text[0:3] forward, samples 0:4" in line for line in lines)
    assert "STEP" in lines[lines.index("") - 1]
    document = json.loads(run_spindle("show", path, "--rank", 2, "--json").out)
    assert len(document["actions"]) == lines.index("")


@examples(60)
@given(
    times=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=4, max_size=4),
    devices=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    width=st.integers(40, 120),
    max_rows=st.integers(1, 5),
)
def test_every_plan_that_can_be_read_can_be_drawn(
    times: list[tuple[float, float]], devices: list[int], width: int, max_rows: int
) -> None:
    """Also one that no check would pass: slices that end before they start, or take no time."""
    data = two_towers()[1].model_dump(mode="json", by_alias=True)
    slices = [piece for wave in data["waves"] for piece in wave["slices"]]
    for piece, (start_s, end_s) in zip(slices, times, strict=True):
        piece.update(start_s=start_s, end_s=end_s)
    slices[0]["devices"] = devices
    plan = Plan.model_validate(data)
    text = draw(plan, width, max_rows).plain
    assert max(map(len, text.splitlines())) <= width
    summarise(plan)


def test_ops_that_run_in_every_micro_batch_count_once() -> None:
    """Three ops, in two micro-batches on one device each; and the picture says which is which."""
    profile = profile_of(cuttable("t/net", 3, {8: 1.0, 4: 0.6}))
    plan = make_plan(profile, cluster_of(1), micro_batches={"t": 2})
    (metaop,) = summarise(plan).metaops
    assert metaop.allocations == (Allocation(num_ops=3, dp=1, tp=1),)
    assert metaop.busy_s == pytest.approx(2 * 3 * 0.6, rel=1e-6)


def test_shares_of_unequal_size_are_told() -> None:
    plan = uneven_plan(cuttable("t/net", 3, {8: 2.0, 4: 1.2}), (0, 5, 7, 8))
    (metaop,) = summarise(plan).metaops
    (allocation,) = metaop.allocations
    assert (allocation.num_ops, allocation.dp, allocation.equal_shares) == (3, 3, False)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(allocation_table(plan, summarise(plan)))
    assert "3 on 3 unequal" in console.export_text()


def test_a_plan_that_ends_before_the_bound_of_equal_shares_says_so() -> None:
    """4 ops at 0.95 s on three devices; on two, which divide 8 samples, 1.2 s."""
    profile = profile_of(cuttable("t/net", 4, {8: 2.0, 4: 1.2, 2: 0.7}, param_bytes_per_op=0))
    plan = make_plan(profile, cluster_of(3))
    assert "compute 3.8 s, 20.8% below the bound of version 1, 4.8 s" in headline(summarise(plan))
    said = headline_of_reasons(explain(plan, profile, plan_name="plan.yaml"))
    assert "the schedule is 20.8% below the bound of version 1, 4.8 s;" in said
    (reason,) = reasons(plan, profile)
    assert [(each.num_devices, each.plan_ops) for each in reason.choices] == [(1, 0), (2, 0), (3, 4)]
