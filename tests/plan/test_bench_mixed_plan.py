"""The planner's benchmark on several types of device: its random profiles, clusters, pairs and tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench_mixed_plan import (
    FREE_ON,
    MANY,
    RANDOM,
    SLOW_CLUSTERS,
    SMALL_GIB,
    THREE_TYPES,
    pairs,
    strategies_on,
    tighter_bound_s,
)
from bench_tables import SMALL
from mixed_clusters import cluster_named, devices_of
from mixed_gaps import gap_of
from mixed_tables import Row, sections, targets_table, worst_of_each
from random_mixed_profiles import random_mixed_profile
from random_profiles import SHAPES, Shape, random_profile

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.check.run import check_plan
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.make import make_plan
from spindle_cli.profile.points import by_device
from spindle_cli.profile.types import Profile

TWO, THREE = "h800-16-h20-16", THREE_TYPES


@pytest.mark.parametrize("shape", SHAPES)
def test_random_profiles_have_curve_and_shares_of_every_metaop_on_every_type(shape: Shape) -> None:
    cluster = cluster_named(THREE)
    profile, base = random_mixed_profile(1, shape, cluster), random_profile(1, shape)
    assert tuple(device.type for device in profile.devices) == cluster.types
    assert Profile.model_validate(profile.model_dump(by_alias=True)) == profile
    for metaop, own in zip(profile.metaops, base.metaops, strict=True):
        curves, shares = by_device(metaop.curve), by_device(metaop.shares)
        assert set(curves) == set(shares) == set(cluster.types)
        for device in cluster.types:
            assert [point.dp for point in curves[device]] == [point.dp for point in own.curve]
            of_shares = {metaop.batch_size // share.samples: share.forward_s for share in shares[device]}
            assert of_shares == {point.dp: point.forward_s for point in curves[device]}


def test_random_profiles_are_the_same_for_a_seed_and_a_type_whatever_other_types_there_are() -> None:
    three, two = cluster_named(THREE), cluster_named(TWO)
    profile = random_mixed_profile(3, "wide", three)
    assert profile == random_mixed_profile(3, "wide", three)
    assert profile.sha256() != random_mixed_profile(4, "wide", three).sha256()
    for metaop, own in zip(profile.metaops, random_mixed_profile(3, "wide", two).metaops, strict=True):
        for device in two.types:
            assert by_device(metaop.curve)[device] == by_device(own.curve)[device]


def test_metaops_differ_in_the_type_that_they_lose_least_on() -> None:
    """Between computing alone, 312 to 148 TFLOP/s, and moving memory alone, 2.039 to 4 TB/s."""
    cluster = cluster_named(THREE)
    profile, base = random_mixed_profile(0, "wide", cluster), random_profile(0, "wide")
    factors = {
        device: [
            by_device(metaop.curve)[device][0].op_s / own.curve[0].op_s
            for metaop, own in zip(profile.metaops, base.metaops, strict=True)
        ]
        for device in cluster.types
    }
    assert factors["a800-80gb"] == pytest.approx([1.0] * len(base.metaops))
    slow = factors["h20-96gb"]
    assert 2.039 / 4 <= min(slow) < 1 < max(slow) <= 312 / 148
    ratios = [own / fast for own, fast in zip(slow, factors["h800-80gb"], strict=True)]
    assert max(ratios) > 2 * min(ratios)


def test_clusters_are_as_their_files_say_or_made_by_their_names() -> None:
    known = cluster_named(THREE)
    assert [group.count * group.devices for group in known.nodes] == list(devices_of(THREE).values())
    made = cluster_named("h800-8-a800-24", memory_gib=SMALL_GIB)
    assert [(group.label, group.count, group.memory_gib) for group in made.nodes] == [
        ("h800", 1, SMALL_GIB),
        ("a800", 3, SMALL_GIB),
    ]
    assert made.name == "h800-8-a800-24"
    assert made.link(0, 8) == known.link(0, 16)  # of an H800's node and an A800's
    assert made.link(0, 1) == known.link(0, 1)
    assert Cluster.model_validate(made.model_dump(by_alias=True)) == made


def test_links_between_nodes_are_no_faster_than_a_name_says() -> None:
    fast, slow = cluster_named(THREE), cluster_named(f"{THREE}-at-1.25")
    assert devices_of(slow.name) == devices_of(THREE)
    speeds = {slow.link(0, other).bandwidth_gb_per_s for other in (8, 16, 32)}
    assert speeds == {1.25}
    assert fast.link(0, 16).bandwidth_gb_per_s > 1.25
    assert slow.link(0, 1) == fast.link(0, 1)
    assert cluster_named(f"{THREE}-at-4000").link(0, 16) == fast.link(0, 16)


def test_links_that_take_no_time_are_between_all_devices() -> None:
    free = cluster_named(f"{THREE}-free")
    assert devices_of(free.name) == devices_of(THREE)
    links = [free.link(0, other) for other in (1, 8, 16, 32)] + [free.link(32, 33), free.link(32, 40)]
    assert {(link.latency_us, link.bandwidth_gb_per_s) for link in links} == {(0.0, 1e9)}


def test_the_tighter_bound_is_worked_out_where_a_plan_is_far_from_the_other_one() -> None:
    """Two MetaOps on three fast devices: two of them do one in 1 s, one in 3 s. Fractions of devices take
    4/3 s; but beside one on two devices there is room for the other on one alone: 1.5 s.
    """
    metaops = []
    for task in "ab":
        metaop = metaop_on_types(f"{task}/net", 1, {"fast": 1.0, "slow": 1000.0}, batch_size=2)
        slower = {"forward_s": 1.0, "backward_s": 2.0}
        shares = [
            each.model_copy(update=slower) if each.device == "fast" and each.samples == 2 else each
            for each in metaop.shares
        ]
        curve = [
            each.model_copy(update=slower) if each.device == "fast" and each.dp == 1 else each
            for each in metaop.curve
        ]
        metaops.append(metaop.model_copy(update={"shares": tuple(shares), "curve": tuple(curve)}))
    profile = profile_on_types(*metaops)
    plan = make_plan(profile, cluster_of_types({"fast": 3, "slow": 1}))
    assert plan.predicted.lower_bound_s == pytest.approx(4 / 3, rel=1e-2)
    assert plan.predicted.compute_s == pytest.approx(2.0)
    assert tighter_bound_s(profile, plan) == pytest.approx(1.5, rel=1e-2)
    near = plan.predicted.model_copy(update={"lower_bound_s": 1.99})
    assert tighter_bound_s(profile, plan.model_copy(update={"predicted": near})) is None


def test_what_is_planned_where() -> None:
    assert list(pairs(["clip-4", "qwen-val", "wide-0"], SLOW_CLUSTERS)) == [
        ("clip-4", SLOW_CLUSTERS[0]),
        ("clip-4", SLOW_CLUSTERS[1]),
    ]
    every = (TWO, "h800-16-h20-32", THREE, MANY)
    assert list(pairs(["clip-4", "clip-10"], every)) == [
        ("clip-4", "h800-16-h20-32"),
        ("clip-10", "h800-16-h20-32"),
        ("clip-10", THREE),
    ]
    assert list(pairs(["wide-0", "wide-1", f"wide-0{SMALL}"], every)) == [
        ("wide-0", TWO),
        ("wide-0", THREE),
        ("wide-0", MANY),
        ("wide-1", TWO),
        ("wide-1", THREE),
        (f"wide-0{SMALL}", TWO),
        (f"wide-0{SMALL}", THREE),
    ]
    assert list(pairs(["wide-0", f"wide-0{SMALL}", "clip-4"], FREE_ON[:1])) == [("wide-0", FREE_ON[0])]
    assert len(RANDOM) == 2 * 3 * len(SHAPES)
    assert strategies_on(MANY) == ("spindle",)
    assert "dp-flops" in strategies_on(THREE)


def test_a_gap_is_what_is_not_listed_and_not_chosen_and_waits() -> None:
    """Six samples of 1 s on the fast device and 2 s on the slow one, twice: 4 s and 2 samples on the slow
    one. On the fast device alone they take 12 s, while the slow one, whose seconds are worth half, waits.
    """
    cluster = cluster_of_types({"fast": 1, "slow": 1})
    profile = profile_on_types(metaop_on_types("t/net", 2, {"fast": 1.0, "slow": 2.0}, batch_size=6))
    best = make_plan(profile, cluster)
    gap = gap_of(best, profile)
    assert (gap.listed, gap.chosen, gap.waiting) == pytest.approx((0.0, 0.0, 0.0), abs=1e-3)
    piece = best.slices[0].model_copy(update={"devices": (0,), "dp": 1, "rows": None, "end_s": 12.0})
    wave = best.waves[0].model_copy(update={"slices": (piece,), "end_s": 12.0})
    predicted = best.predicted.model_copy(update={"compute_s": 12.0})
    alone = gap_of(best.model_copy(update={"waves": (wave,), "predicted": predicted}), profile)
    assert alone.listed == pytest.approx(gap.listed)
    assert alone.listed + alone.chosen + alone.waiting == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("name", ["h800-8-h20-8", "h800-8-a800-8-h20-8"])
def test_random_profiles_are_planned_for_and_the_parts_of_their_gaps_are_all_of_it(name: str) -> None:
    cluster = cluster_named(name)
    profile = random_mixed_profile(0, "towers", cluster)
    plan = make_plan(profile, cluster, effort=0)
    assert check_plan(plan, profile) == ()
    gap, predicted = gap_of(plan, profile), plan.predicted
    whole = predicted.compute_s / predicted.lower_bound_s - 1
    assert gap.listed + gap.chosen + gap.waiting == pytest.approx(whole)
    assert min(gap.listed, gap.chosen, gap.waiting) > -1e-3


def row(workload: str, cluster: str, gap: float, planning_s: float = 1.0) -> Row:
    return Row(workload, cluster, "spindle", 2.0, 1 + gap, 1.0, None, planning_s)


ROWS = [
    row("clip-4", "h800-16-h20-32", 0.02),
    row("qwen-val", "h100-16-a100-32", 0.04, 4.25),
    replace(row("clip-7", "h800-16-h20-32", 0.0), iteration_s=None),
    row("wide-0", TWO, 0.01),
    row("wide-1", THREE, 0.3),
    row(f"wide-1{SMALL}", THREE, 0.5),
    replace(row("wide-1", TWO, 0.1), tighter_s=1.05),
    row("wide-1", f"{TWO}-free", 0.2),
    row("wide-0", MANY, 0.7, 33.0),
    Row("wide-0", TWO, "dp-even", 9.0, 9.0, 1.0),
]


def test_targets_are_told_by_class() -> None:
    assert targets_table(ROWS).splitlines()[2:] == [
        "| two types, the paper's | 2 of 3 | 3.0% (3%) | 4.0% (8%) |  |  | 4.2 s (3 s) |",
        "| two types, random | 2 | 5.5% (3%) | 10.0% (8%) | 2.9% | 4.8% | 1.0 s (3 s) |",
        "| two types, random, links that take no time | 1 | 20.0% (3%) | 20.0% (8%) |  |  | 1.0 s (3 s) |",
        "| three types, random | 1 | 30.0% (3%) | 30.0% (8%) |  |  | 1.0 s |",
        "| three types, random, 40 GiB | 1 | 50.0% (3%) | 50.0% (8%) |  |  | 1.0 s |",
        "| three types x 256, random | 1 | 70.0% | 70.0% |  |  | 33.0 s (20 s) |",
    ]


def test_the_worst_of_each_class_is_told() -> None:
    told = [(name, worst.workload) for name, worst in worst_of_each(ROWS)]
    assert told == [
        ("two types, the paper's", "qwen-val"),
        ("two types, random", "wide-1"),
        ("two types, random, links that take no time", "wide-1"),
        ("three types, random", "wide-1"),
        ("three types, random, 40 GiB", f"wide-1{SMALL}"),
        ("three types x 256, random", "wide-0"),
    ]


def test_tables_are_of_the_papers_workloads_and_of_random_ones() -> None:
    _, _, paper, _, drawn, _, free = sections(ROWS)
    assert paper.splitlines()[2] == "| clip-4, h800-16-h20-32 | 2000 |  |  |  | 2.0% |  |  | 1.0 |"
    assert paper.splitlines()[4] == "| clip-7, h800-16-h20-32 | no plan |  |  |  | - | - | - | - |"
    assert drawn.splitlines()[2] == f"| wide-0, {TWO} | 2000 |  | 9000 |  | 1.0% |  |  | 1.0 |"
    assert f"| wide-1, {TWO} | 2000 |  |  |  | 10.0% | 4.8% |  | 1.0 |" in drawn.splitlines()
    assert free.splitlines()[2:] == [f"| wide-1, {TWO}-free | 2000 |  |  |  | 20.0% |  |  | 1.0 |"]
    assert len(list(sections(ROWS[:3]))) == 3


def test_plans_behind_slow_links_have_a_table_of_their_own_and_count_for_no_target() -> None:
    slow = row("clip-4", SLOW_CLUSTERS[0], 2.0)
    found = list(sections([*ROWS, slow]))
    assert found[0] == targets_table(ROWS)
    assert found[2] == list(sections(ROWS))[2]
    assert found[4].splitlines()[2:] == [
        f"| clip-4, {SLOW_CLUSTERS[0]} | 2000 |  |  |  | 200.0% |  |  | 1.0 |"
    ]
