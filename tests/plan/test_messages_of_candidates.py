"""What messages and gradient sums take of devices counts in a search of candidates, by prices solved by
hand.
"""

from __future__ import annotations

from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.files.cluster import Cluster, Link, Links
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.search.climb import Dispatcher
from spindle_cli.plan.search.improve import search
from spindle_cli.plan.search.listing import time_jobs, to_pieces
from spindle_cli.plan.search.prices import edge_bytes
from spindle_cli.profile.types import MetaOpProfile

NOTHING: dict[str, Any] = {"parameters": None, "param_bytes_per_op": 0}


def chain(devices: int, handed_on: int, cluster: Cluster) -> Problem:
    """Two ops of 2 s on one device, then one of 1 s on some."""
    first = metaop_of("t/first", 2, {1: 2.0}, **NOTHING).model_copy(update={"output_bytes": handed_on})
    second = metaop_of("t/second", 1, {devices: 1.0}, inputs=("t/first",), **NOTHING)
    return make_problem(profile_of(first, second), cluster)


def end_s(problem: Problem, *, backwards: bool = False) -> float:
    dispatcher = Dispatcher(problem, lower_bound(problem), backwards=backwards)
    return dispatcher.run(dispatcher.guide(0.0)).end_s


@pytest.mark.parametrize("num_devices", [2, 4])
def test_what_goes_to_other_devices_takes_as_long_as_the_side_with_fewer_sends(num_devices: int) -> None:
    """5 GB at 5 GB/s with 10 us, and as much back: 2.00002 s of the devices of the slice that starts, two in
    a dispatch forwards and one in one backwards.
    """
    problem = chain(2, 5 * 10**9, cluster_of(num_devices))
    assert end_s(problem) == pytest.approx(5 + 2.00002 * 2 / num_devices, rel=1e-9)
    assert end_s(problem, backwards=True) == pytest.approx(5 + 2.00002 / num_devices, rel=1e-9)


def test_what_stays_on_as_many_devices_or_is_nothing_takes_no_time() -> None:
    assert end_s(chain(1, 5 * 10**9, cluster_of(2))) == 5.0
    assert end_s(chain(2, 0, cluster_of(2))) == 5.0


def test_devices_of_a_node_share_its_cards() -> None:
    """Between nodes at 1 GB/s 4 GB from one device take 4 s, and from two that share a node's card as long,
    there and back; four of four devices wait.
    """
    nodes = cluster_of(4, devices_per_node=2)
    assert end_s(chain(4, 4 * 10**9, nodes)) == pytest.approx(5 + 8.00004, rel=1e-9)
    wide = metaop_of("t/wide", 1, {2: 1.0}, **NOTHING).model_copy(update={"output_bytes": 4 * 10**9})
    wider = metaop_of("t/wider", 1, {4: 1.0}, inputs=("t/wide",), **NOTHING)
    problem = make_problem(profile_of(wide, wider), nodes)
    assert end_s(problem) == pytest.approx(2 + 8.00004, rel=1e-9)


def test_how_fast_a_link_is_depends_on_the_bytes_of_a_share() -> None:
    """4 GB from two devices to four are 2 GB each: 1 GB/s, as messages of 2 GB go, and not 9 as of 4."""
    slow = Link(latency_us=0, bandwidth_gb_per_s=9, curve=((2e9, 1.0), (4e9, 9.0)))
    cluster = cluster_of(4).with_links(Links(intra_node=slow, inter_node=slow))
    wide = metaop_of("t/wide", 1, {2: 1.0}, **NOTHING).model_copy(update={"output_bytes": 4 * 10**9})
    wider = metaop_of("t/wider", 1, {4: 1.0}, inputs=("t/wide",), **NOTHING)
    assert end_s(make_problem(profile_of(wide, wider), cluster)) == pytest.approx(2 + 2 * 2.0, rel=1e-9)


def test_of_two_inputs_one_is_there_and_the_other_moves() -> None:
    towers = [
        metaop_of(f"t/{name}", 1, {1: 2.0}, **NOTHING).model_copy(update={"output_bytes": 5 * 10**9})
        for name in ("left", "right")
    ]
    loss = metaop_of("t/loss", 1, {1: 1.0}, inputs=("t/left", "t/right"), **NOTHING)
    problem = make_problem(profile_of(*towers, loss), cluster_of(2))
    assert end_s(problem) == pytest.approx(3 + 2.00002 / 2, rel=1e-9)


def test_a_quarter_of_gradient_sums_counts() -> None:
    """Sums of 4 GB on two of four devices, in a ring of two at 5 GB/s: 0.8 s; on one there is none."""
    bytes_of_op = {"param_bytes_per_op": 2 * 10**9}
    wide = make_problem(profile_of(metaop_of("t/m", 2, {2: 1.0}, **bytes_of_op)), cluster_of(4))
    assert end_s(wide) == pytest.approx(2 + 0.25 * 0.8 / 2, abs=1e-4)
    alone = make_problem(profile_of(metaop_of("t/m", 2, {1: 1.0}, **bytes_of_op)), cluster_of(4))
    assert end_s(alone) == 2.0


def test_sums_of_a_step_are_those_of_each_of_its_batches_in_part() -> None:
    metaop = metaop_of("t/m", 2, {2: 1.0}, param_bytes_per_op=2 * 10**9)
    profile = profile_of(metaop).model_copy(update={"accumulate": 4})
    assert end_s(make_problem(profile, cluster_of(4))) == pytest.approx(2 + 0.25 * 0.8 / 2 / 4, abs=1e-4)


def test_parts_of_a_metaop_hand_on_what_its_ops_do() -> None:
    metaop = metaop_of("t/m", 2, {1: 1.0}, inner_output_bytes=7)
    after = metaop_of("t/n", 1, {1: 1.0}, inputs=("t/m",))
    fallback = MemoryFallback(recompute={"t/m": 1})
    first, second, third = make_problem(profile_of(metaop, after), cluster_of(2), fallback).nodes
    assert (edge_bytes(first, second), edge_bytes(second, third)) == (7.0, 2.0**16)


def slices_of(metaop: MetaOpProfile) -> list[tuple[int, int, int]]:
    """Ops and devices of its slices in the best candidate, beside an op of 3 s on one of two devices."""
    other = metaop_of("u/other", 1, {1: 3.0}, **NOTHING)
    problem = make_problem(profile_of(metaop, other), cluster_of(2))
    jobs = search(problem, lower_bound(problem), 20_000, seed=0)[0]
    pieces = to_pieces(problem, time_jobs(problem, jobs))
    return [(piece.first, piece.last, piece.point.num_devices) for piece in pieces if piece.node == 0]


def test_a_metaop_is_cut_where_what_moves_is_worth_it() -> None:
    """Three ops of 2 s on one device, 1.1 s on both: 6 s, or one on both, 5.1 s. With 2.4 s for what one op
    hands to the next, of one device or two, 6.3 s at least.
    """
    shape: dict[str, Any] = {"name": "t/m", "num_ops": 3, "op_s": {1: 2.0, 2: 1.1}, **NOTHING}
    both_orders = ([(0, 2, 1), (2, 3, 2)], [(0, 1, 2), (1, 3, 1)])
    assert slices_of(metaop_of(**shape, inner_output_bytes=0)) in both_orders
    assert slices_of(metaop_of(**shape, inner_output_bytes=6 * 10**9)) == [(0, 3, 1)]
