"""Both passes with the messages between slices, on cases added up by hand: who waits behind whom.

Ops of 1 s: 1/3 s forward, 2/3 s backward. Inside a node a message takes 10 us and its bytes at 5 GB/s,
between nodes 20 us and 1 GB/s.
"""

from __future__ import annotations

import pytest
from candidates import candidate_of, predicted, problem_of

from helpers.plans import cluster_of, metaop_of
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Placed
from spindle_cli.profile.types import MetaOpProfile

GB = 10**9
INSIDE_S, BETWEEN_S = 10e-6 + 0.2, 20e-6 + 1.0  # of 1 GB


def maker(name: str, op_s: float = 1.0) -> MetaOpProfile:
    return metaop_of(name, 1, {1: op_s}, parameters=None).model_copy(update={"output_bytes": GB})


def taker(name: str, *inputs: str) -> MetaOpProfile:
    return metaop_of(name, 1, {1: 1.0}, inputs=inputs, parameters=None)


def added_s(problem: Problem, *jobs: tuple[int, float, int]) -> float:
    """What transfers add to a schedule of (MetaOp, start, device)."""
    candidate = candidate_of(problem, *((node, 0, 1, 1, start_s) for node, start_s, _ in jobs))
    placed = Placed(candidate, tuple((device,) for *_, device in jobs))
    return predicted(problem, placed, candidate.end_s).transfer_s


def test_what_a_device_receives_comes_one_after_another_and_so_does_what_it_sends() -> None:
    """Two makers hand 1 GB each to one taker, and get as much back."""
    problem = problem_of(cluster_of(3), maker("a/m"), maker("a/n"), taker("a/t", "a/m", "a/n"))
    assert added_s(problem, (0, 0.0, 0), (1, 0.0, 1), (2, 1.0, 2)) == pytest.approx(4 * INSIDE_S)


def two_chains(cluster: Cluster) -> float:
    """Device 0 hands to device 2 and 1 to 3 what they made at the same time."""
    problem = problem_of(cluster, maker("a/m"), maker("b/m"), taker("a/t", "a/m"), taker("b/t", "b/m"))
    return added_s(problem, (0, 0.0, 0), (1, 0.0, 1), (2, 1.0, 2), (3, 1.0, 3))


def test_inside_a_node_two_pairs_of_devices_exchange_side_by_side() -> None:
    assert two_chains(cluster_of(4)) == pytest.approx(2 * INSIDE_S)


def test_between_nodes_two_pairs_share_a_card_both_ways() -> None:
    """The second chain's activation waits for the first's, and its gradient comes in its turn."""
    assert two_chains(cluster_of(4, devices_per_node=2)) == pytest.approx(2 * BETWEEN_S + BETWEEN_S)


def test_what_is_made_first_is_sent_first() -> None:
    """Device 0 makes 1 GB for device 1, then, 0.1 s later, as much for device 2, whose op waits behind both;
    then the second gradient comes back alone, behind the first, which came long before.
    """
    problem = problem_of(
        cluster_of(3), maker("a/m", 0.3), maker("b/m", 0.3), taker("a/t", "a/m"), taker("b/t", "b/m")
    )
    found = added_s(problem, (0, 0.0, 0), (1, 0.3, 0), (2, 0.6, 1), (3, 0.6, 2))
    # Forward: 0.1 + two messages, then 1/3 s; backward: 2/3 s, a message, and 0.2 s of each maker.
    assert found == pytest.approx(0.1 + 2 * INSIDE_S + 1.0 + INSIDE_S + 2 * 0.2 - 1.6)


def test_what_waits_for_what_another_device_makes_later_does_not_hold_up_what_is_ready() -> None:
    """Device 2 takes from device 0, which is through after 0.1 s, and from device 1, after 1/3 s: the first
    message arrives meanwhile.
    """
    problem = problem_of(cluster_of(3), maker("a/m", 0.3), maker("a/n"), taker("a/t", "a/m", "a/n"))
    found = added_s(problem, (0, 0.0, 0), (1, 0.0, 1), (2, 1.0, 2))
    # Back, the first MetaOp's gradient goes first: the other's, of 2/3 s more, waits for it.
    assert found == pytest.approx(1 / 3 + INSIDE_S + 1.0 + 2 * INSIDE_S + 2 / 3 - 2.0)
