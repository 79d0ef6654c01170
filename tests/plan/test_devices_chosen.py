"""Which devices a placement takes, one reason at a time."""

from __future__ import annotations

from candidates import candidate_of, problem_of

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.plan.placing.placement import BALANCED, PlacementWeights, place
from spindle_cli.plan.placing.usage import Footprint
from spindle_cli.plan.posing import make_problem


def test_where_memory_counts_the_device_that_holds_less_is_taken() -> None:
    problem = problem_of(cluster_of(2), metaop_of("a/m", 1, {1: 1.0}), metaop_of("b/m", 1, {1: 1.0}))
    candidate = candidate_of(problem, (0, 0, 1, 1, 0.0), (1, 0, 1, 1, 1.0))
    assert place(problem, candidate, BALANCED).devices == ((0,), (1,))
    assert place(problem, candidate, PlacementWeights()).devices == ((0,), (0,))


def test_of_nodes_with_no_device_that_holds_the_input_the_nearer_is_taken() -> None:
    """One device of each node is free when `b` starts; the other two of node 1 hold its input, and are
    taken.
    """
    problem = problem_of(
        cluster_of(6, devices_per_node=3),
        metaop_of("z/m", 1, {2: 5.0}),
        metaop_of("a/m", 1, {2: 1.0}),
        metaop_of("a/y", 1, {2: 4.0}, inputs=("a/m",)),
        metaop_of("a/b", 1, {1: 1.0}, inputs=("a/m",)),
    )
    candidate = candidate_of(
        problem, (0, 0, 1, 2, 0.0), (1, 0, 1, 2, 0.0), (2, 0, 1, 2, 1.0), (3, 0, 1, 1, 1.0)
    )
    assert place(problem, candidate, PlacementWeights()).devices == ((0, 1), (3, 4), (3, 4), (5,))


def test_devices_that_hold_as_many_rows_are_worth_the_same_wherever_the_rows_begin() -> None:
    """Devices 0 and 1 hold halves of what `n` takes; it goes to the one with the first rows."""
    metaops = (metaop_of("a/m", 1, {2: 1.0}), metaop_of("a/n", 1, {1: 1.0}, inputs=("a/m",)))
    problem = problem_of(cluster_of(3), *metaops)
    candidate = candidate_of(problem, (0, 0, 1, 2, 0.0), (1, 0, 1, 1, 1.0))
    assert place(problem, candidate, PlacementWeights()).devices == ((0, 1), (0,))


def test_the_larger_of_two_inputs_says_where_their_taker_goes() -> None:
    """`m` hands on 64 KiB, `n` 128 KiB."""
    large = metaop_of("a/n", 1, {1: 1.0}).model_copy(update={"output_bytes": 2**17})
    metaops = (metaop_of("a/m", 1, {1: 1.0}), large, metaop_of("a/t", 1, {1: 1.0}, inputs=("a/m", "a/n")))
    problem = problem_of(cluster_of(3), *metaops)
    candidate = candidate_of(problem, (0, 0, 1, 1, 0.0), (1, 0, 1, 1, 0.0), (2, 0, 1, 1, 1.0))
    assert place(problem, candidate, PlacementWeights()).devices == ((0,), (1,), (1,))


def test_a_device_holds_gradients_as_wide_as_they_are_added_up_while_pieces_are_placed() -> None:
    """1 MiB of bfloat16 parameters an op, twice as much of float32 gradients, and of state."""
    profile = profile_of(metaop_of("a/m", 2, {1: 1.0})).model_copy(update={"gradient_bytes_per_param": 2.0})
    problem = make_problem(profile, cluster_of(1))
    (piece,) = candidate_of(problem, (0, 0, 2, 1, 0.0)).pieces
    assert Footprint(problem, piece).parameter_bytes == 2 * (1 + 2 + 2) * 2**20
