"""Placement and prediction: locality, rows, memory, and iterations added up by hand."""

from __future__ import annotations

import pytest
from candidates import candidate_of, predicted, problem_of

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import NodeGroup
from spindle_cli.plan.assemble import exact_slices
from spindle_cli.plan.best.find import BelowBoundError, require_above
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.placing.arrange import arrange, bound_together
from spindle_cli.plan.placing.calendar import Calendar
from spindle_cli.plan.placing.placement import PlacementWeights, place, place_in_sequence
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.schedule import Placed
from spindle_cli.plan.search.evaluate import best_of, measure
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, ProcessorCosts
from spindle_cli.simulate.run import simulate

STRATEGIES: tuple[StrategyName, ...] = ("sequential", "distmm", "optimus", "spindle")
ANY = {1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}


def test_a_metaops_next_slice_stays_where_it_is() -> None:
    problem = problem_of(
        cluster_of(4), metaop_of("a/m", 2, ANY, parameters=None), metaop_of("b/m", 1, ANY, parameters=None)
    )
    candidate = candidate_of(problem, (0, 0, 1, 2, 0.0), (1, 0, 1, 2, 0.0), (0, 1, 2, 2, 4.0))
    first, _, next_slice = place(problem, candidate, PlacementWeights()).devices
    assert next_slice == first


def test_a_consumer_goes_to_the_node_of_its_input() -> None:
    cluster = cluster_of(4, devices_per_node=2)
    problem = problem_of(
        cluster,
        metaop_of("a/m", 1, ANY),
        metaop_of("b/m", 1, ANY),
        metaop_of("b/n", 1, ANY, inputs=("b/m",)),
        metaop_of("a/n", 1, ANY, inputs=("a/m",)),
    )
    candidate = candidate_of(
        problem, (0, 0, 1, 2, 0.0), (1, 0, 1, 2, 0.0), (2, 0, 1, 2, 4.0), (3, 0, 1, 2, 4.0)
    )
    a, b, after_b, after_a = place(problem, candidate, PlacementWeights()).devices
    assert (after_b, after_a) == (b, a)
    assert {cluster.node_of[d] for d in a} != {cluster.node_of[d] for d in b}


def test_a_wider_slice_keeps_the_rows_that_devices_hold() -> None:
    """From shares of 1/2 on devices 0 and 1 to shares of 1/4: each keeps a quarter of its half."""
    problem = problem_of(cluster_of(4), metaop_of("a/m", 2, ANY))
    candidate = candidate_of(problem, (0, 0, 1, 2, 0.0), (0, 1, 2, 4, 4.0))
    narrow, wide = place(problem, candidate, PlacementWeights()).devices
    for share, device in enumerate(wide):
        if device in narrow:
            assert share // 2 == narrow.index(device)


def test_metaops_with_the_same_parameters_share_devices() -> None:
    problem = problem_of(
        cluster_of(4),
        metaop_of("a/m", 1, ANY, parameters="p"),
        metaop_of("b/m", 1, ANY, parameters="q"),
        metaop_of("c/m", 1, ANY, parameters="q"),
        metaop_of("d/m", 1, ANY, parameters="p"),
    )
    candidate = candidate_of(
        problem, (0, 0, 1, 2, 0.0), (1, 0, 1, 2, 0.0), (2, 0, 1, 2, 4.0), (3, 0, 1, 2, 4.0)
    )
    p, q, q_again, p_again = (
        set(devices) for devices in place(problem, candidate, PlacementWeights()).devices
    )
    assert (p_again, q_again) == (p, q)


def test_in_sequence_is_the_lowest_free_devices() -> None:
    problem = problem_of(cluster_of(4), metaop_of("a/m", 1, ANY), metaop_of("b/m", 1, ANY))
    candidate = candidate_of(problem, (0, 0, 1, 1, 0.0), (1, 0, 1, 2, 0.0))
    assert place_in_sequence(problem, candidate).devices == ((0,), (1, 2))


def test_memory_is_balanced_when_it_is_short() -> None:
    """Four MetaOps of 1 GiB each in turn on one device: two devices with room for two each."""
    metaops = [
        metaop_of(f"{name}/m", 1, {1: 1.0}, param_bytes_per_op=2**28, activation_bytes_per_op=0)
        for name in "abcd"
    ]
    problem = problem_of(cluster_of(2, memory_gib=2.5), *metaops)
    candidate = candidate_of(problem, *((i, 0, 1, 1, float(i)) for i in range(4)))
    (evaluated,) = best_of(problem, [candidate])
    assert evaluated is not None
    assert max(need.total_bytes for need in evaluated.memory) <= 2.5 * 2**30
    assert measure(problem, "by hand", exact_slices(problem, Placed(candidate, ((0,),) * 4))) is None


def test_one_device_has_no_transfers_and_no_sums() -> None:
    plan = make_plan(profile_of(metaop_of("a/m", 3, ANY)), cluster_of(1))
    assert plan.predicted.iteration_s == plan.predicted.compute_s == pytest.approx(24.0)


def test_a_gradient_sum_follows_the_backward_pass() -> None:
    """2 devices, 1 op: the ring moves 1 MiB once each way after everything else is done."""
    cluster = cluster_of(2)
    problem = problem_of(cluster, metaop_of("a/m", 1, {2: 3.0}, param_bytes_per_op=2**20))
    placed = place(problem, candidate_of(problem, (0, 0, 1, 2, 0.0)), PlacementWeights())
    prediction = predicted(problem, placed, 3.0)
    assert prediction.transfer_s == pytest.approx(0.0)
    assert prediction.gradient_sum_s == pytest.approx(2 * (10e-6 + 2**19 / 5e9))


def test_gradients_of_what_tensor_parallelism_splits_are_summed_over_data_parallel_shares_alone() -> None:
    """8 MiB on 8 devices: dp 1 x tp 8 sums nothing; dp 2 x tp 4 sums 2 MiB over each of 4 pairs, at once."""
    cluster = cluster_of(8)
    alone = problem_of(cluster, split_metaop("a/m", 4.0, dp=1, tp=8, param_bytes_per_op=2**23))
    devices = Placed(candidate_of(alone, (0, 0, 1, 8, 0.0)), (tuple(range(8)),))
    assert predicted(alone, devices, 4.0).gradient_sum_s == 0.0
    pairs = problem_of(cluster, split_metaop("a/m", 4.0, dp=2, tp=4, param_bytes_per_op=2**23))
    devices = Placed(candidate_of(pairs, (0, 0, 1, 8, 0.0)), (tuple(range(8)),))
    assert predicted(pairs, devices, 4.0).gradient_sum_s == pytest.approx(2 * (10e-6 + 2**20 / 5e9))


def test_what_tensor_parallelism_leaves_whole_is_summed_over_all_its_devices() -> None:
    problem = problem_of(
        cluster_of(2),
        split_metaop(
            "a/m", 4.0, dp=1, tp=2, param_bytes_per_op=2**23 + 2**20, whole_param_bytes_per_op=2**20
        ),
    )
    placed = Placed(candidate_of(problem, (0, 0, 1, 2, 0.0)), ((0, 1),))
    assert predicted(problem, placed, 4.0).gradient_sum_s == pytest.approx(2 * (10e-6 + 2**19 / 5e9))


def test_a_step_of_several_batches_sums_and_updates_once_and_transfers_in_each() -> None:
    """Of 4 batches, each pays the two transfers, and a quarter of the sum and of a step of 1 s."""
    metaops = (
        metaop_of("a/m", 1, {1: 3.0}, parameters="p"),
        metaop_of("a/n", 1, {1: 3.0}, inputs=("a/m",), parameters="p"),
    )
    profile = profile_of(*metaops).model_copy(update={"accumulate": 4})
    problem = make_problem(profile, cluster_of(2))
    candidate = candidate_of(problem, (0, 0, 1, 1, 0.0), (1, 0, 1, 1, 3.0))
    moved = predicted(problem, Placed(candidate, ((0,), (1,))), 6.0, step_s=1.0)
    assert moved.transfer_s == pytest.approx(2 * (10e-6 + 2**16 / 5e9))
    # Device 1 has run its op backward before device 0 has; the sum comes behind that.
    assert moved.gradient_sum_s == pytest.approx(2 * (10e-6 + 2**19 / 5e9) / 4)
    assert moved.optimizer_s == pytest.approx(1.0 / 4)
    assert moved.iteration_s == pytest.approx(6.0 + moved.transfer_s + moved.gradient_sum_s + 0.25)


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_what_shared_optimizers_update_is_gathered_before_the_next_forward_pass(batches: int) -> None:
    """Two ops of 1 MiB on two devices: half of an all-reduce behind backward, of the first op's gradients;
    the second op's hide behind its backward pass; then two flags are told. In front, the first op's gather is
    waited for, and the second's hides behind the first op's forward pass.
    """
    profile = profile_of(metaop_of("a/m", 2, {2: 3.0})).model_copy(
        update={"optimizer_state_sharded": True, "accumulate": batches}
    )
    problem = make_problem(profile, cluster_of(2))
    prediction = predicted(problem, Placed(candidate_of(problem, (0, 0, 2, 2, 0.0)), ((0, 1),)), 6.0)
    flags_s = 2 * (10e-6 + 1 / 5e9)
    assert prediction.gradient_sum_s == pytest.approx((2 * (10e-6 + 2**19 / 5e9) + flags_s) / batches)


def test_gradients_come_back_to_each_device_of_a_split_share() -> None:
    """A share of two devices hands its output to a third once; both need the gradient, one after another."""
    problem = problem_of(
        cluster_of(3),
        split_metaop("a/m", 3.0, dp=1, tp=2),
        metaop_of("a/n", 1, {1: 3.0}, inputs=("a/m",)),
    )
    candidate = candidate_of(problem, (0, 0, 1, 2, 0.0), (1, 0, 1, 1, 3.0))
    moved = predicted(problem, Placed(candidate, ((0, 1), (2,))), 6.0)
    assert moved.transfer_s == pytest.approx(3 * (10e-6 + 2**16 / 5e9))


def test_a_transfer_delays_its_consumer_both_ways() -> None:
    """The output, 64 KiB, moves from device 0 to 1 and its gradient back."""
    problem = problem_of(
        cluster_of(2), metaop_of("a/m", 1, {1: 3.0}), metaop_of("a/n", 1, {1: 3.0}, inputs=("a/m",))
    )
    candidate = candidate_of(problem, (0, 0, 1, 1, 0.0), (1, 0, 1, 1, 3.0))
    moved = predicted(problem, Placed(candidate, ((0,), (1,))), 6.0)
    assert moved.transfer_s == pytest.approx(2 * (10e-6 + 2**16 / 5e9))
    assert predicted(problem, Placed(candidate, ((0,), (0,))), 6.0).transfer_s == pytest.approx(0.0)


def test_messages_and_the_losses_sum_take_time_of_processors_that_send_them() -> None:
    """Each device computes 3 s; 1 ms for each of 2 messages (there and back) and of the 8 ends of the losses'
    sum, which goes in two segments, is spread over it.
    """
    profile = profile_of(metaop_of("a/m", 1, {1: 3.0}), metaop_of("a/n", 1, {1: 3.0}, inputs=("a/m",)))
    costs = ProcessorCosts(message_s=0.001)
    problem = make_problem(profile.model_copy(update={"processor": costs}), cluster_of(2))
    candidate = candidate_of(problem, (0, 0, 1, 1, 0.0), (1, 0, 1, 1, 3.0))
    moved = predicted(problem, Placed(candidate, ((0,), (1,))), 6.0)
    assert moved.processor_s == pytest.approx(2 * 0.010)
    assert moved.transfer_s == pytest.approx(2 * (10e-6 + 2**16 / 5e9))


def split_metaop(name: str, op_s: float, *, dp: int, tp: int, **more: object) -> MetaOpProfile:
    """A MetaOp with one allocation."""
    point = CurvePoint(
        num_devices=dp * tp,
        dp=dp,
        tp=tp,
        forward_s=op_s / 2,
        backward_s=op_s / 2,
        source="measured",
    )
    return metaop_of(name, 1, {1: 1.0}, **more).model_copy(update={"curve": (point,)})


def test_a_split_slice_waits_until_a_whole_node_is_free() -> None:
    """Two nodes of 2. One long op keeps a device of node 0 until 6 s; c wants two devices of one node at 2 s,
    when one is free on each. Node 1's other device is free at 4 s, and what follows c starts after it.
    """
    cluster = cluster_of(4, devices_per_node=2)
    problem = problem_of(
        cluster,
        metaop_of("a/m", 1, {1: 6.0}, parameters=None),
        metaop_of("a/n", 1, {1: 2.0}, parameters=None),
        metaop_of("b/m", 1, {1: 4.0}, parameters=None),
        metaop_of("b/n", 1, {1: 2.0}, parameters=None),
        split_metaop("c/m", 1.0, dp=1, tp=2, inputs=("a/n", "b/n")),
        metaop_of("c/n", 1, {2: 1.0}, inputs=("c/m",)),
    )
    jobs = [(i, 0, 1, 1, 0.0) for i in range(4)] + [(4, 0, 1, 2, 2.0), (5, 0, 1, 2, 3.0)]
    placed = place(problem, candidate_of(problem, *jobs), PlacementWeights())
    *_, split, after = placed.devices
    assert placed.devices[:4] == ((0,), (1,), (2,), (3,))
    assert split == (2, 3)
    assert set(after) == {2, 3}
    ends = {piece.metaop: piece.end_s for piece in exact_slices(problem, placed)}
    assert ends["c/m"] == pytest.approx(5.0)
    assert ends["c/n"] == pytest.approx(6.0)


def test_what_comes_after_a_late_slice_is_late_too() -> None:
    """As above, c runs from 4 s to 5 s on node 1, not from 2 s. The next slice, on three devices, then has
    its devices at 5 s, and whoever comes at 4 s finds all four free at 6 s only.
    """
    problem = problem_of(
        cluster_of(4, devices_per_node=2),
        metaop_of("a/m", 1, {1: 6.0}),
        metaop_of("b/m", 1, {1: 4.0}),
        split_metaop("c/m", 1.0, dp=1, tp=2),
        metaop_of("d/m", 1, {3: 1.0}, batch_size=6),
        metaop_of("e/m", 1, {1: 1.0}),
    )
    jobs = ((0, 0, 1, 1, 0.0), (1, 0, 1, 1, 0.0), (2, 0, 1, 2, 2.0), (3, 0, 1, 3, 3.0), (4, 0, 1, 1, 4.0))
    candidate = candidate_of(problem, *jobs)
    calendar = Calendar(problem, candidate)
    a, b, c, d, e = candidate.pieces
    calendar.take(a, (0,))
    calendar.take(b, (2,))
    assert calendar.available(c, list) == [1, 2, 3]
    calendar.take(c, (2, 3))
    assert calendar.available(d, list) == [1, 2, 3]
    calendar.take(d, (1, 2, 3))
    assert calendar.available(e, list) == [0, 1, 2, 3]


def test_whole_groups_are_taken_of_each_node() -> None:
    """Nodes of 3 devices and groups of 2: one group of each node, and one device of each left over."""
    cluster = cluster_of(6, devices_per_node=3)
    problem = problem_of(cluster, split_metaop("a/m", 1.0, dp=2, tp=2))
    candidate = candidate_of(problem, (0, 0, 1, 4, 0.0))
    for placed in (place(problem, candidate, PlacementWeights()), place_in_sequence(problem, candidate)):
        ((a, b, c, d),) = placed.devices
        assert [cluster.node_of[device] for device in (a, b)] == [0, 0]
        assert [cluster.node_of[device] for device in (c, d)] == [1, 1]


def test_an_allocation_whose_groups_no_nodes_hold_is_none() -> None:
    """6 devices hold dp 3 x tp 2 by number; two nodes of 3 hold two groups of two, and none of four."""
    cluster = cluster_of(6, devices_per_node=3)
    two = split_metaop("a/m", 1.0, dp=2, tp=2)
    three = split_metaop("a/m", 0.5, dp=3, tp=2, batch_size=6)
    both = three.model_copy(update={"curve": (*two.curve, *three.curve)})
    assert [point.dp for point in problem_of(cluster, both).nodes[0].points] == [2]
    with pytest.raises(NoPlanError, match=r"dp 1 x tp 4\) has .* inside a node; the nodes have 3 devices"):
        problem_of(cluster, split_metaop("a/m", 1.0, dp=1, tp=4))


def test_baselines_keep_groups_inside_nodes() -> None:
    """Side by side, two splits of 2 devices each would be 0-1 and 2-3 on nodes of 3; the second crosses."""
    cluster = cluster_of(6, devices_per_node=3)
    profile = profile_of(split_metaop("a/m", 1.0, dp=1, tp=2), split_metaop("b/m", 1.0, dp=1, tp=2))
    for strategy in STRATEGIES:
        plan = make_plan(profile, cluster, strategy)
        assert all(cluster.is_inside_node(piece.devices) for piece in plan.slices), strategy


def test_exchanges_between_nodes_move_whole_groups() -> None:
    """Two nodes of 4: x and y sum 16 MiB each over a group of each node; exchanged, each is on one node."""
    cluster = cluster_of(8, devices_per_node=4)
    of_x, of_y = (
        [
            split_metaop(f"{task}/m", 1.0, dp=1, tp=2, parameters=shared, param_bytes_per_op=2**24)
            for task in tasks
        ]
        for shared, tasks in (("x", "ab"), ("y", "cd"))
    )
    problem = problem_of(cluster, *of_x, *of_y)
    candidate = candidate_of(problem, *((i, 0, 1, 2, 0.0) for i in range(4)))
    placed = exact_slices(problem, Placed(candidate, ((0, 1), (4, 5), (2, 3), (6, 7))))
    assert bound_together(placed, 8) == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]
    a, b, c, d = (piece.devices for piece in arrange(problem, placed, 40)[0])
    assert all(cluster.is_inside_node(devices) for devices in (a + b, c + d))
    assert sorted(a + b + c + d) == list(range(8))


def test_a_schedule_below_the_bound_is_our_bug() -> None:
    problem = problem_of(cluster_of(1), metaop_of("a/m", 1, {1: 3.0}))
    placed = Placed(candidate_of(problem, (0, 0, 1, 1, 0.0)), ((0,),))
    evaluated = measure(problem, "by hand", exact_slices(problem, placed))
    assert evaluated is not None
    require_above(evaluated.prediction.compute_s, evaluated.prediction.compute_s, "by hand")
    with pytest.raises(BelowBoundError, match=r"ends at 3 s, before the lower bound .* 3\.0001 s"):
        require_above(3.0001, evaluated.prediction.compute_s, "by hand")


@pytest.mark.parametrize(("nics", "at_once"), [(1, 1), (2, 2), (4, 4), (None, 4)])
def test_transfers_of_a_node_go_through_its_cards_one_after_another(nics: int | None, at_once: int) -> None:
    """4 shares of 16 KiB move from one node to the other, and their gradients back."""
    group = NodeGroup(count=2, devices=4, device="a800-80gb", memory_gib=4, nics=nics)
    cluster = cluster_of(8).model_copy(update={"nodes": (group,)})
    curve = {4: 3.0}
    problem = problem_of(
        cluster, metaop_of("a/m", 1, curve), metaop_of("a/n", 1, curve, inputs=("a/m",), parameters="a/n")
    )
    candidate = candidate_of(problem, (0, 0, 1, 4, 0.0), (1, 0, 1, 4, 3.0))
    moved = predicted(problem, Placed(candidate, ((0, 1, 2, 3), (4, 5, 6, 7))), 6.0)
    assert moved.transfer_s == pytest.approx(2 * 4 / at_once * (20e-6 + 2**14 / 1e9))


def test_nothing_fits_says_what_and_what_would() -> None:
    big = metaop_of("a/m", 4, {1: 1.0, 2: 0.5}, param_bytes_per_op=2**29, activation_bytes_per_op=2**20)
    with pytest.raises(NoPlanError) as caught:
        make_plan(profile_of(big), cluster_of(2, memory_gib=4))
    text = str(caught.value)
    assert "device" in text
    assert "too little" in text
    assert "optimizer state 4 GiB" in text
    assert "would fit" in text


def test_as_much_is_recomputed_as_memory_asks_for() -> None:
    """Activations of 6 GiB in 4 GiB: 3 GiB may stay, as the ops that are recomputed run backward last."""
    deep = metaop_of("a/m", 6, {1: 3.0}, param_bytes_per_op=0, activation_bytes_per_op=2**30)
    plan = make_plan(profile_of(deep), cluster_of(1, memory_gib=4))
    assert any("recomput" in note for note in plan.notes)
    assert sum(piece.num_ops for piece in plan.slices if piece.recompute) == 3
    assert plan.predicted.compute_s == pytest.approx(3 * 4.0 + 3 * 3.0)


def test_too_few_devices_for_any_allocation() -> None:
    with pytest.raises(NoPlanError, match="smallest valid allocation has 4"):
        make_plan(profile_of(metaop_of("a/m", 1, {4: 1.0})), cluster_of(2))


def test_the_optimizer_steps_after_the_sums_on_the_device_that_holds_most() -> None:
    """Device 0 updates 3 MiB, device 1 1 MiB, at 1 s per MiB; neither shares its parameters."""
    profile = profile_of(
        metaop_of("a/m", 3, {1: 2.0}, param_bytes_per_op=2**20),
        metaop_of("b/n", 1, {1: 6.0}, param_bytes_per_op=2**20),
    ).model_copy(update={"optimizer_s_per_byte": 2.0**-20})
    plan = make_plan(profile, cluster_of(2))
    assert plan.predicted.compute_s == pytest.approx(6.0)
    assert plan.predicted.optimizer_s == pytest.approx(3.0)
    assert simulate(plan).iteration_s == pytest.approx(9.0) == plan.predicted.iteration_s
    assert [step.end_s - step.start_s for step in simulate(plan).steps] == pytest.approx([3.0, 1.0])
