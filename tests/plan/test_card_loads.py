"""What messages leave of network cards for sums and gathers, by hand."""

from __future__ import annotations

import pytest
from candidates import candidate_of, predicted, problem_of
from slow_links import apart

from helpers.plans import cluster_of, metaop_of
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.placing.card_loads import Busy, CardLoads
from spindle_cli.plan.schedule import Placed

# Of two nodes with a card each.
FIRST, SECOND = (0, 0), (1, 0)


@pytest.mark.parametrize(
    ("start_s", "seconds", "busy", "end_s"),
    [
        (0.0, 2.0, [], 2.0),
        (0.0, 2.0, [(1.0, 3.0, FIRST)], 4.0),
        (0.0, 2.0, [(2.0, 3.0, FIRST)], 2.0),  # just over
        (0.0, 2.0, [(1.99, 3.0, FIRST)], 3.01),
        (1.0, 2.0, [(0.0, 1.0, FIRST)], 3.0),
        (0.5, 2.0, [(0.0, 1.0, FIRST)], 3.0),
        (0.0, 2.0, [(1.0, 3.0, FIRST), (2.0, 4.0, SECOND)], 5.0),  # one of its cards is busy until 4
        (0.0, 2.0, [(2.0, 4.0, SECOND), (1.0, 3.0, FIRST)], 5.0),  # in any order
        (0.0, 2.0, [(1.0, 4.0, FIRST), (2.0, 3.0, FIRST)], 5.0),  # in and out of one card
        (0.0, 3.0, [(1.0, 2.0, FIRST), (3.0, 5.0, SECOND)], 6.0),
    ],
)
def test_a_collective_stands_still_while_one_of_its_cards_has_a_message(
    start_s: float, seconds: float, busy: list[tuple[float, float, tuple[int, int]]], end_s: float
) -> None:
    loads = CardLoads((Busy(*each) for each in busy), cluster_of(2, devices_per_node=1))
    assert loads.end_s((0, 1), start_s, seconds) == pytest.approx(end_s)


def test_it_does_not_inside_a_node_nor_for_messages_on_other_cards() -> None:
    loads = CardLoads([Busy(0.0, 9.0, FIRST)], cluster_of(6, devices_per_node=2))
    assert loads.end_s((0, 1), 0.0, 2.0) == 2.0
    assert loads.end_s((2, 3, 4, 5), 0.0, 2.0) == 2.0
    assert loads.end_s((1, 2), 0.0, 2.0) == 11.0


def nodes_with_slow_links(num_nodes: int) -> Cluster:
    """Two devices, with 1 GB/s between them."""
    cluster = apart(2, gb_per_s=1.0)
    (group,) = cluster.nodes
    shape = {"count": num_nodes, "devices": 2 // num_nodes}
    return cluster.changed(nodes=(group.model_copy(update=shape),))


@pytest.mark.parametrize(
    ("num_nodes", "sum_s", "added_s"), [(2, 2.0, 0.0), (2, 4.0, 0.0), (2, 5.0, 1.0), (1, 5.0, 0.0)]
)
def test_a_sum_beside_a_gradient_message_takes_as_much_longer(
    num_nodes: int, sum_s: float, added_s: float
) -> None:
    """Between two nodes a second for a's activations, as long for their gradients; ops 1 s forward, 2 s back.
    Forward a's first op until 1 s, its message until 2, its second op until 3, d until 4; backward d until 6,
    when the sum of c and d may begin, a's second op until 8, its message until 9, its first op until 11.
    """
    sum_bytes = round(sum_s * 1e9)
    problem = problem_of(
        nodes_with_slow_links(num_nodes),
        metaop_of("a/one", 1, {1: 3.0}).model_copy(update={"output_bytes": 10**9}),
        metaop_of("a/two", 1, {1: 3.0}, inputs=("a/one",)),
        metaop_of("c/m", 1, {1: 3.0}, parameters="p", param_bytes_per_op=sum_bytes),
        metaop_of("d/m", 1, {1: 3.0}, parameters="p", param_bytes_per_op=sum_bytes),
    )
    candidate = candidate_of(
        problem, (0, 0, 1, 1, 0.0), (2, 0, 1, 1, 3.0), (1, 0, 1, 1, 3.0), (3, 0, 1, 1, 6.0)
    )
    prediction = predicted(problem, Placed(candidate, ((0,), (0,), (1,), (1,))), 9.0)
    assert prediction.transfer_s == pytest.approx(2.0)
    assert prediction.gradient_sum_s == pytest.approx(added_s, abs=1e-3)


@pytest.mark.parametrize(("num_nodes", "added_s"), [(2, 1.5), (1, 0.5)])
def test_a_gather_beside_a_message_takes_as_much_longer(num_nodes: int, added_s: float) -> None:
    """A gather of 1.5 s, for c and d; a's message is under way from 1 to 2 s, inside a node in nobody's way.
    The first device runs a's first op until 1 s, then c, as soon as its parameters are there, 3 s forward and
    6 back, and a's first op back. So all is through as much later than at 12 s as c starts later than at 1 s.
    """
    problem = problem_of(
        nodes_with_slow_links(num_nodes),
        metaop_of("a/one", 1, {1: 3.0}).model_copy(update={"output_bytes": 10**9}),
        metaop_of("a/two", 1, {1: 3.0}, inputs=("a/one",)),
        metaop_of("c/m", 1, {1: 9.0}, parameters="p", param_bytes_per_op=3 * 10**9),
        metaop_of("d/m", 1, {1: 3.0}, parameters="p", param_bytes_per_op=3 * 10**9),
        optimizer_state_sharded=True,
    )
    candidate = candidate_of(
        problem, (0, 0, 1, 1, 0.0), (2, 0, 1, 1, 3.0), (1, 0, 1, 1, 3.0), (3, 0, 1, 1, 6.0)
    )
    prediction = predicted(problem, Placed(candidate, ((0,), (0,), (1,), (1,))), 12.0)
    assert prediction.transfer_s == 0.0
    assert prediction.gradient_sum_s == pytest.approx(added_s, abs=1e-3)
