"""Rules for shares of unequal size, and what a file may say of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.cut import cuttable
from helpers.examples import examples
from helpers.plans import cluster_of, plan_of, profile_of, slice_of
from spindle_cli.account.device_memory import device_memory
from spindle_cli.check.run import check_plan
from spindle_cli.check.types import Violation
from spindle_cli.cli.validity import CANNOT_LINK
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import parse_yaml
from spindle_cli.plan.file import plan_text
from spindle_cli.plan.slices import equal_rows
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile
from spindle_cli.program.link import link
from spindle_cli.program.proof.proof import prove
from spindle_cli.simulate.run import simulate

Data = dict[str, Any]


def profile() -> Profile:
    """A batch of 8, 2 s on one device, 1.2 s for half of it, so 1.4 s for 5 samples; then what takes it."""
    first = cuttable("t/first", 2, {8: 2.0, 4: 1.2, 2: 0.7})
    second = cuttable("t/second", 1, {8: 1.0, 4: 0.6}, inputs=("t/first",))
    return profile_of(first, second)


def written(rows: Sequence[Any] | None = (0, 5, 7, 8), *, num_devices: int = 3, **more: Any) -> Data:
    """`t/first` on 3 devices by `rows`, for as long as 5 samples take; then `t/second` on one."""
    first, second = profile().metaops
    op_s = 1.2 + (2.0 - 1.2) / 4
    whole = [slice_of(each, (0, each.num_ops), (0,), 0.0) for each in (first, second)]
    ends_s = 2 * op_s / 3, 2 * op_s / 3 + 1 / 3
    cut = {"devices": tuple(range(num_devices)), "dp": num_devices, "start_s": 0.0, "end_s": ends_s[0]}
    cut |= {"backward_start_s": ends_s[1] + 2 / 3, "backward_end_s": ends_s[1] + 2 / 3 + 4 * op_s / 3}
    behind = {"start_s": ends_s[0], "end_s": ends_s[1], "backward_start_s": ends_s[1]}
    behind |= {"backward_end_s": ends_s[1] + 2 / 3}
    slices = [whole[0].model_copy(update=cut), whole[1].model_copy(update=behind)]
    if rows == (0, 5, 7, 8):
        slices[0] = slices[0].model_copy(update={"rows": rows})
    memory = device_memory(profile().metaops, slices, cluster_of(3), profile())
    plan = plan_of(profile(), cluster_of(3), [[piece] for piece in whole], lower_bound_s=3.0)
    data: Data = parse_yaml(plan_text(plan), where="plan.yaml")
    data["schema"] = "spindle.plan/2"
    end_s = ends_s[1] + 2 / 3 + 4 * op_s / 3
    peaks = [need.total_bytes for need in memory]
    data["predicted"] |= {"compute_s": end_s, "iteration_s": end_s, "peak_memory_bytes": peaks}
    for wave, piece in zip(data["waves"], slices, strict=True):
        wave["start_s"], wave["end_s"] = piece.start_s, piece.end_s
        said = piece.model_dump(mode="json", exclude={"micro_batch"})
        wave["slices"] = [{key: value for key, value in said.items() if value is not None}]
    if rows is not None:
        data["waves"][0]["slices"][0]["rows"] = list(rows)
    data["waves"][0]["slices"][0] |= more
    return data


def read(data: Data) -> Plan:
    return Plan.from_data(data, where="plan.yaml")


def violations(data: Data) -> list[Violation]:
    return list(check_plan(read(data)))


def test_shares_of_unequal_size_are_read_judged_and_written_again() -> None:
    plan = read(written())
    assert plan.slices[0].rows == (0, 5, 7, 8)
    assert check_plan(plan, profile()) == check_plan(plan) == ()
    assert parse_yaml(plan_text(plan), where="plan.yaml")["waves"][0]["slices"][0]["rows"] == [0, 5, 7, 8]
    assert "rows" not in parse_yaml(plan_text(plan), where="plan.yaml")["waves"][1]["slices"][0]
    assert read(parse_yaml(plan_text(plan), where="plan.yaml")) == plan


def test_a_pass_lasts_as_long_as_its_largest_share() -> None:
    """5 samples take 1.4 s: a third of that forward, twice."""
    data = written()
    data["waves"][0]["slices"][0]["end_s"] *= 0.999
    assert [each.rule for each in violations(data)] == ["duration"]
    data = written()
    data["waves"][0]["slices"][0]["backward_end_s"] *= 0.999
    assert "duration" in [each.rule for each in violations(data)]


@pytest.mark.parametrize("rows", [(0, 4, 7, 8), (0, 5, 6, 8), (0, 1, 6, 8)])
def test_shorter_largest_shares_and_other_orders_last_no_longer(rows: tuple[int, ...]) -> None:
    assert {each.rule for each in violations(written(rows))} <= {"peak-memory"}


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ((0, 5, 7, 9), "[0, 5, 7, 9]"),
        ((0, 5, 7, 7), "[0, 5, 7, 7]"),
        ((1, 5, 7, 8), "[1, 5, 7, 8]"),
        ((0, 5, 5, 8), "[0, 5, 5, 8]"),
        ((0, 5, 4, 8), "[0, 5, 4, 8]"),
        ((0, 5, 8), "[0, 5, 8]"),
        ((0, 1, 5, 7, 8), "[0, 1, 5, 7, 8]"),
        ((0, 2, 4), "[0, 2, 4]"),
    ],
)
def test_rows_ascend_from_0_to_the_end_of_the_batch_a_share_for_each(rows: Sequence[int], shown: str) -> None:
    (found,) = violations(written(rows))
    assert (found.rule, found.where, found.value) == ("rows", "wave 0, t/first[0:2]", f"rows {shown}")
    assert found.expected == "4 ascending offsets from 0 to 8, the size of its batch, for 3 shares (dp)"


def test_rows_of_a_plan_without_metaops_are_judged_as_far_as_they_tell() -> None:
    data = written((0, 5, 7, 9))
    del data["metaops"]
    assert violations(data) == []
    data["waves"][0]["slices"][0]["rows"] = [0, 5, 3, 9]
    (found,) = violations(data)
    assert found.expected == "4 ascending offsets from 0 to the size of its batch, for 3 shares (dp)"


def test_there_are_tp_devices_for_every_share() -> None:
    (found,) = violations(written(devices=[0, 1]))
    assert (found.rule, found.value, found.expected) == ("allocation", "2 devices", "dp 3 x tp 1 = 3 devices")


def test_many_rows_are_not_all_shown() -> None:
    (found,) = violations(written(tuple(range(0, 30, 2))))
    assert found.value == "rows [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, ...]"


def test_the_largest_share_is_one_that_the_profile_reaches_to() -> None:
    """Shares are known from 2 samples to 8, of `tp` 1."""
    data = written()
    data["metaops"][0]["shares"] = [each for each in data["metaops"][0]["shares"] if each["samples"] < 5]
    (found,) = [each for each in violations(data) if each.rule == "allocation"]
    assert (found.value, found.expected) == (
        "a share of 5 samples, tp 1",
        "within the MetaOp's shares for tp 1: from 2 to 4 samples",
    )
    data = written(tp=2, devices=[0, 1, 2, 3, 4, 5])
    data["cluster"]["nodes"][0]["devices"] = 6
    data["predicted"]["peak_memory_bytes"] *= 2
    (found,) = [each for each in violations(data) if each.rule == "allocation"]
    assert found.expected == "within the MetaOp's shares for tp 2: none"


def test_rows_that_are_equal_shares_say_nothing() -> None:
    """They go by the curve, as without."""
    data = written((0, 4, 8), num_devices=2)
    assert read(data).slices[0].rows is None
    assert "rows" not in parse_yaml(plan_text(read(data)), where="plan.yaml")["waves"][0]["slices"][0]
    assert read(written((0, 4, 9), num_devices=2)).slices[0].rows == (0, 4, 9)
    assert read(written((0, 2, 4), num_devices=2)).slices[0].rows == (0, 2, 4)


def test_rows_count_from_the_beginning_of_a_micro_batch() -> None:
    data = written((0, 3, 4), num_devices=2) | {"micro_batches": {"t": 2}}
    again = [{**wave, "index": wave["index"] + 2} for wave in data["waves"]]
    for wave in again:
        wave["slices"] = [{**piece, "micro_batch": 1} for piece in wave["slices"]]
    data["waves"] += again
    assert "rows" not in {each.rule for each in violations(data)}
    data["waves"][2]["slices"][0]["rows"] = [0, 3, 8]
    (found,) = violations(data)
    assert (found.rule, found.where) == ("rows", "wave 2, t/first[0:2] 2/2")
    assert found.expected == "3 ascending offsets from 0 to 4, the size of its micro-batch, for 2 shares (dp)"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([0, 5, 7.5, 8], "rows[2]"),
        ([0, 5, True, 8], "rows[2]"),
        ([0, -1, 7, 8], "rows[1]"),
        ([0], "rows"),
        ("0-8", "rows"),
        (8, "rows"),
    ],
)
def test_rows_are_a_list_of_numbers(rows: object, said: str) -> None:
    data = written()
    data["waves"][0]["slices"][0]["rows"] = rows
    with pytest.raises(InputError, match=r"waves\[0\]\.slices\[0\]\.") as raised:
        read(data)
    assert said in str(raised.value)


def test_version_1_has_no_rows() -> None:
    data = written()
    data["schema"] = "spindle.plan/1"
    for wave in data["waves"]:
        for piece in wave["slices"]:
            del piece["backward_start_s"], piece["backward_end_s"]
    with pytest.raises(InputError, match="rows: expected none in version 1"):
        read(data)


def test_the_profile_has_the_share_that_rows_ask_for() -> None:
    data = written()
    data["metaops"][0]["shares"] = [
        {"samples": 5, "forward_s": 1.3 / 3, "backward_s": 2.6 / 3, "source": "fitted"}
    ]
    found = check_plan(read(data), profile())
    assert [(each.rule, each.where) for each in found] == [("curve", "metaops, t/first.shares")]


def test_a_device_holds_what_its_own_share_takes() -> None:
    """Of 2 ops with 256 KiB of activations for the batch, device 0 keeps 5/8, device 2 an eighth."""
    needs = device_memory(profile().metaops, read(written()).slices, cluster_of(3), profile())
    kept = [need.activation_bytes for need in needs]
    assert kept[1] == pytest.approx(2 * kept[2], rel=0.01)
    data = written()
    data["predicted"]["peak_memory_bytes"] = [needs[0].total_bytes] * 3
    (found,) = violations(data)
    assert (found.rule, found.devices) == ("peak-memory", (1, 2))


@examples(60)
@given(
    st.integers(0, 1),
    st.fixed_dictionaries(
        {},
        optional={
            "rows": st.lists(st.integers(0, 9), min_size=2, max_size=5),
            "devices": st.lists(st.integers(0, 3), min_size=1, max_size=4),
            "dp": st.integers(1, 4),
            "tp": st.integers(1, 2),
            "micro_batch": st.integers(0, 1),
        },
    ),
    st.booleans(),
)
def test_any_edit_is_judged_and_what_passes_is_linked_proved_and_simulated(
    wave: int, changes: Data, is_cut: bool
) -> None:
    """No plan that can be read stops the check; none that passes it has a share of no samples."""
    data = written() | ({"micro_batches": {"t": 2}} if is_cut else {})
    data["waves"][wave]["slices"][0] |= changes
    try:
        plan = read(data)
    except InputError:  # there is no such micro-batch
        return
    rules = {each.rule for each in check_plan(plan, profile())}
    if rules & CANNOT_LINK:
        return
    for piece in plan.slices:
        rows = piece.rows or equal_rows(8 // piece.micro_batches, piece.dp)
        assert rows[0] == 0 and rows[-1] == 8 // piece.micro_batches
        assert all(low < high for low, high in pairwise(rows))
    prove(link(plan))
    assert simulate(plan).step_s > 0
