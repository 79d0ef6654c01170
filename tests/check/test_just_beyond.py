"""Rules at their boundary and just beyond it, and all that is wrong said together.

The plan is `two_towers`: vision [0:3] from 0 to 3 s on devices 0-1, text from 0 to 1.5 s on 2-3; vision [3:4]
to 3.6 s on 0-3; the loss to 3.8 s on 0. Times may be off by a millionth of the shortest slice concerned.
"""

from __future__ import annotations

from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of, two_towers
from spindle_cli.check.run import check_plan
from spindle_cli.check.types import CheckReport, Violation
from spindle_cli.plan.types import Plan


def edited(*changes: tuple[str, Any]) -> Plan:
    """The plan with other values at paths such as 'waves.1.slices.0.start_s'."""
    data = two_towers()[1].model_dump(mode="json", by_alias=True)
    for path, value in changes:
        *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        place: Any = data
        for key in parents:
            place = place[key]
        place[last] = value
    return Plan.model_validate(data)


def rules(plan: Plan, with_profile: bool = False) -> list[str]:
    return sorted({v.rule for v in check_plan(plan, two_towers()[0] if with_profile else None)})


SLICE_1, LOSS = "waves.1.slices.0", "waves.2.slices.0"


@pytest.mark.parametrize(
    ("off_s", "places", "broken"),
    [
        (2e-7, [(f"{LOSS}.end_s", 3.8, -1)], ["duration"]),
        (6e-7, [(f"{SLICE_1}.start_s", 3.0, -1), ("waves.1.start_s", 3.0, -1)], ["device-busy", "order"]),
        (2e-7, [(f"{LOSS}.start_s", 3.6, -1), ("waves.2.start_s", 3.6, -1)], ["device-busy", "producer"]),
        (3e-6, [("waves.0.end_s", 3.0, -1)], ["wave-times"]),
        (1.5e-6, [("waves.0.start_s", 0.0, 1)], ["wave-times"]),
        (2e-7, [("waves.2.start_s", 3.0, -1)], ["wave-order"]),
        (3.8e-6, [("predicted.compute_s", 3.8, -1)], ["compute"]),
        (3.8e-6, [("predicted.compute_s", 3.8, 1)], ["compute", "iteration"]),
        (3.8e-6, [("predicted.lower_bound_s", 3.8, 1)], ["lower-bound"]),
        (3.8e-6, [("predicted.iteration_s", 3.8, -1)], ["iteration"]),
    ],
)
def test_times_may_be_off_by_a_millionth_and_no_more(
    off_s: float, places: list[tuple[str, float, int]], broken: list[str]
) -> None:
    def off_by(share: float) -> Plan:
        return edited(*((path, value + sign * share * off_s) for path, value, sign in places))

    assert rules(off_by(0.98)) == []
    assert rules(off_by(1.02)) == broken


@pytest.mark.parametrize("sign", [-1, 1])
def test_stated_memory_may_be_off_by_a_millionth_and_a_few_bytes(sign: int) -> None:
    whole = two_towers()[1].predicted.peak_memory_bytes[2]
    off = int(1e-6 * whole) + 64
    assert rules(edited(("predicted.peak_memory_bytes.2", whole + sign * off))) == []
    (found,) = check_plan(edited(("predicted.peak_memory_bytes.2", whole + sign * (off + 1))))
    assert (found.rule, found.devices) == ("peak-memory", (2,))


def test_a_device_may_be_full_to_the_last_byte() -> None:
    most = max(two_towers()[1].predicted.peak_memory_bytes)
    assert rules(edited(("cluster.nodes.0.memory_gib", most / 2**30))) == []
    found = check_plan(edited(("cluster.nodes.0.memory_gib", (most - 1) / 2**30)))
    assert {violation.rule for violation in found} == {"memory"}


@pytest.mark.parametrize(("share", "broken"), [(0.98, []), (1.02, ["lower-bound"])])
def test_a_bound_may_be_a_millionth_below_the_work(share: float, broken: list[str]) -> None:
    assert rules(edited(("predicted.lower_bound_s", 2.8 * (1 - share * 1e-6))), with_profile=True) == broken


@pytest.mark.parametrize(
    ("lower_bound_s", "broken"), [(3.7, []), (3.69, ["at least 3.7 s (3.7 s), which the work"])]
)
def test_a_bound_is_at_least_the_longest_chain_at_its_fastest(
    lower_bound_s: float, broken: list[str]
) -> None:
    """a: 2 ops of 1.1 s on both devices, b: 1 of 1 s, then c of both, 1.5 s. What four devices could do does
    not count; the work, 2 x 2 + 1 + 2 s, is 3.5 s for each device.
    """
    a = metaop_of("t/a", 2, {1: 2.0, 2: 1.1, 4: 0.1})
    b = metaop_of("t/b", 1, {1: 1.0})
    c = metaop_of("t/c", 1, {1: 2.0, 2: 1.5}, inputs=(b.name, a.name))
    waves = [
        [slice_of(a, (0, 2), (0, 1), 0.0)],
        [slice_of(b, (0, 1), (0,), 2.2)],
        [slice_of(c, (0, 1), (0, 1), 3.2)],
    ]
    profile = profile_of(a, b, c)
    plan = plan_of(profile, cluster_of(2), waves, lower_bound_s=lower_bound_s)
    assert [
        v.expected[: len(text)] for v, text in zip(check_plan(plan, profile), broken, strict=True)
    ] == broken


def test_all_that_is_wrong_is_said_together() -> None:
    """Structure, times, predictions and memory: nothing found first keeps another from being found."""
    plan = edited(
        ("waves.0.slices.1.devices", [2, 2]),
        ("waves.0.end_s", 2.0),
        (f"{SLICE_1}.ops", [2, 4]),
        (f"{SLICE_1}.start_s", 2.5),
        ("waves.1.start_s", 2.5),
        (f"{LOSS}.devices", [0, 1]),
        (f"{LOSS}.dp", 2),
        (f"{LOSS}.start_s", 3.5),
        ("waves.2.start_s", 2.0),
        ("predicted.compute_s", 3.0),
        ("predicted.lower_bound_s", 3.9),
        ("predicted.iteration_s", 1.0),
        ("predicted.peak_memory_bytes", [1, 1, 1]),
        ("cluster.nodes.0.memory_gib", 0.001),
    )
    found = rules(plan)
    assert found == [
        "allocation",
        "compute",
        "coverage",
        "device-busy",
        "device-twice",
        "duration",
        "iteration",
        "lower-bound",
        "memory",
        "order",
        "peak-memory",
        "producer",
        "wave-order",
        "wave-times",
    ]
    against = {violation.rule for violation in check_plan(plan, two_towers()[0])}
    assert against == set(found)


def test_parts_that_do_not_exist_are_all_said_and_nothing_of_the_rest() -> None:
    plan = edited(
        ("waves.0.slices.0.metaop", "pairs/audio"),
        ("waves.0.slices.1.ops", [2, 4]),
        (f"{SLICE_1}.devices", [2, 3, 4, 7]),
        (f"{SLICE_1}.start_s", 0.0),
        ("waves.2.index", 3),
        ("metaops.1.parameter_blocks", [0, 0]),
    )
    found = {violation.rule: violation for violation in check_plan(plan)}
    assert set(found) == {"unknown-metaop", "ops-range", "unknown-device", "wave-index", "parameter-blocks"}
    assert found["unknown-device"].devices == (4, 7)
    assert found["ops-range"].where == "wave 0, pairs/text[2:4]"
    assert str(found["wave-index"]) == "waves[2]: index is 3; expected 2, its position [wave-index]"


@pytest.mark.parametrize("ops", [[1, 1], [2, 1], [3, 4]])
def test_ops_begin_before_they_end_and_end_with_the_last(ops: list[int]) -> None:
    assert "ops-range" in rules(edited(("waves.0.slices.1.ops", ops)))


def test_a_gap_and_a_repetition_in_the_middle_are_both_named() -> None:
    net = metaop_of("t/a", 6, {1: 1.0})
    waves = [
        [slice_of(net, ops, (0,), start)] for ops, start in (((0, 2), 0.0), ((3, 5), 2.0), ((4, 6), 4.0))
    ]
    found = check_plan(plan_of(profile_of(net), cluster_of(1), waves))
    assert [(violation.where, violation.value) for violation in found] == [
        ("metaops, t/a", "no slice runs ops [2, 3)"),
        ("wave 2, t/a[4:6]", "runs ops [4, 5) a second time"),
    ]


def test_a_device_that_is_busy_for_long_is_busy_for_all_who_come_meanwhile() -> None:
    """a runs from 0 to 10 s; b within it from 1 to 2 s, and c from 5 to 6 s."""
    long, b, c = (metaop_of(f"{task}/m", 1, {1: s}) for task, s in (("a", 10.0), ("b", 1.0), ("c", 1.0)))
    waves = [
        [slice_of(long, (0, 1), (0,), 0.0)],
        [slice_of(b, (0, 1), (0,), 1.0)],
        [slice_of(c, (0, 1), (0,), 5.0)],
    ]
    found = check_plan(plan_of(profile_of(long, b, c), cluster_of(2), waves))
    assert [(violation.rule, violation.where) for violation in found] == [
        ("device-busy", "wave 1, b/m[0:1]"),
        ("device-busy", "wave 2, c/m[0:1]"),
    ]
    assert all("a/m[0:1] on the same device has ended at 10 s" in violation.expected for violation in found)


def test_a_consumer_waits_for_the_last_slice_of_its_input_to_end_wherever_the_file_has_it() -> None:
    """The maker's second slice ends at 2 s, the consumer's first op starts at 1.5 s."""
    maker = metaop_of("t/a", 2, {1: 1.0})
    taker = metaop_of("t/b", 2, {1: 1.0}, inputs=(maker.name,))
    second, first = slice_of(maker, (1, 2), (1,), 1.0), slice_of(maker, (0, 1), (0,), 0.0)
    early, late = slice_of(taker, (0, 1), (0,), 1.5), slice_of(taker, (1, 2), (0,), 2.5)
    waves = [[first], [second], [early], [late]]
    (found,) = check_plan(plan_of(profile_of(maker, taker), cluster_of(2), waves))
    assert (found.rule, found.where) == ("producer", "wave 2, t/b[0:1]")
    assert found.expected == "not before its input t/a has ended at 2 s (2 s)"


def test_the_report_counts_what_was_checked_and_lists_what_is_wrong() -> None:
    plan = two_towers()[1]
    assert str(CheckReport.of("p.yaml", plan, ())) == "p.yaml: valid (4 slices in 3 waves on 4 devices)"
    wrong = Violation(rule="order", where="wave 1", devices=(0, 1, 3), value="a", expected="b")
    report = CheckReport.of("p.yaml", plan, (wrong,))
    assert not report.valid
    line = "  wave 1, devices 0, 1, 3: a; expected b [order]"
    assert str(report) == f"p.yaml: 1 violation (4 slices in 3 waves on 4 devices)\n{line}"
    assert str(CheckReport.of("p.yaml", plan, (wrong, wrong))).startswith("p.yaml: 2 violations (")
