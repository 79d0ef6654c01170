"""Tasks cut into micro-batches: what one is, all of them by the plan of one, and how many memory asks for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from plan_corpus.problems import PROBLEMS

from helpers.cut import cuttable, shares_of
from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.traffic import traffic_of
from spindle_cli.check.run import check_plan
from spindle_cli.errors import NoPlanError, UsageError
from spindle_cli.plan.best.micro_batches import alike_micro_batches, in_micro_batches
from spindle_cli.plan.best.request import parse_counts
from spindle_cli.plan.make import make_plan
from spindle_cli.profile.types import MetaOpProfile, OpMemory, ProcessorCosts, Profile
from spindle_cli.simulate.run import simulate
from spindle_cli.units import MIB

# Of a batch of 12: 0.1 s for a sample and 0.3 s besides.
LINEAR = {n: 0.3 + 0.1 * n for n in (1, 2, 3, 4, 6, 12)}


def test_a_micro_batch_has_its_part_of_all_that_grows_with_samples() -> None:
    memory = OpMemory(
        kept_bytes=(7, 100), forward_bytes=(1, 50), backward_bytes=(0, 10), first_backward_bytes=(5, 11)
    )
    net = cuttable("t/net", 2, LINEAR, memory=(memory,), field_bytes={0: 25}, activation_bytes_per_op=100)
    net = net.model_copy(update={"output_bytes": 10, "inner_output_bytes": 9, "flops_per_op": 6e9})
    (part,) = in_micro_batches(profile_of(net), {"t": 3}, cluster_of(4)).one.metaops
    assert (part.name, part.batch_size, part.output_bytes, part.inner_output_bytes) == ("t/net", 4, 4, 3)
    assert (part.activation_bytes_per_op, part.field_bytes, part.flops_per_op) == (34, {0: 9}, 2e9)
    assert part.memory[0].kept_bytes == (7, 34)  # rounded up: never too little
    assert part.memory[0].first_backward_bytes == (5, 4)
    # 4 samples on one device, 2 on two, 1 on four; three devices cut no micro-batch evenly
    assert [(point.dp, round(point.op_s, 6)) for point in part.curve] == [(1, 0.7), (2, 0.5), (4, 0.4)]


def test_curves_of_micro_batches_reach_as_far_as_shares_are_known_and_devices_are_there() -> None:
    net = cuttable("t/net", 1, {n: LINEAR[n] for n in (2, 4, 12)})
    split = net.model_copy(
        update={
            "shares": tuple(
                sorted((*net.shares, *shares_of({6: 0.5}, tp=2)), key=lambda s: (s.samples, s.tp))
            )
        }
    )
    (part,) = in_micro_batches(profile_of(split), {"t": 2}, cluster_of(4)).one.metaops
    # of 6 samples: 6 and 3 lie between shares, 2 is one, 1.5 is no number of samples, 1 is not known
    assert [(point.dp, point.tp, round(point.op_s, 6)) for point in part.curve] == [
        (1, 1, 0.9),
        (2, 1, 0.6),
        (1, 2, 0.5),
        (3, 1, 0.5),
    ]
    with pytest.raises(NoPlanError, match="knows no share of 1 samples"):
        in_micro_batches(profile_of(split), {"t": 12}, cluster_of(4))


def test_all_micro_batches_run_one_behind_the_other_on_one_device() -> None:
    """3 x 2 ops x (0.3 + 0.4) s; the whole batch takes 2 x 1.5 s."""
    profile = profile_of(cuttable("t/net", 2, LINEAR))
    plan = make_plan(profile, cluster_of(1), micro_batches={"t": 3})
    assert plan.micro_batches == {"t": 3}
    assert [(piece.metaop, piece.ops, piece.micro_batch) for piece in plan.slices] == [
        ("t/net", (0, 2), 0),
        ("t/net", (0, 2), 1),
        ("t/net", (0, 2), 2),
    ]
    assert plan.predicted.compute_s == pytest.approx(4.2, abs=1e-6)
    assert plan.predicted.lower_bound_s == pytest.approx(3.0, abs=1e-6)  # of whole batches
    assert [(share.samples, share.forward_s) for share in plan.metaops[0].shares] == [
        (4, pytest.approx(0.7 / 3))
    ]
    assert plan.metaops[0].curve == ()
    assert check_plan(plan, profile) == ()


def test_micro_batches_share_parameters_without_a_name_too() -> None:
    """2 MiB of parameters in two blocks, with as much of gradients and twice of optimizer state."""
    net = cuttable("t/net", 2, LINEAR, parameters=None)
    plan = make_plan(profile_of(net), cluster_of(2), "sequential", micro_batches={"t": 3})
    memory = device_memory(plan.metaops, plan.slices, plan.cluster, plan)
    assert memory[0].parts["parameters"] == 2 * MIB
    # Parts of a batch are rounded up for the search, to bytes.
    assert plan.predicted.peak_memory_bytes == pytest.approx([each.total_bytes for each in memory], abs=16)
    found = traffic_of(plan).groups
    assert sum(group.num_bytes for group in found) == 2 * MIB  # summed once


def test_readings_of_all_micro_batches_are_planned_for() -> None:
    """12 samples at 50 ms, in one go or three."""
    net = cuttable("t/net", 1, {12: 1.2, 4: 0.4}, field_bytes={0: 1})
    costs = ProcessorCosts(load_s={"t": 0.05})
    profile = profile_of(net).model_copy(update={"processor": costs})
    for counts in ({}, {"t": 3}):
        plan = make_plan(profile, cluster_of(1), micro_batches=counts)
        assert plan.predicted.processor_s == pytest.approx(0.6, rel=1e-6)
        assert simulate(plan).iteration_s == pytest.approx(1.8, rel=1e-4)


def test_tasks_may_have_different_numbers_and_one_stay_whole() -> None:
    profile = profile_of(
        cuttable("a/net", 1, LINEAR), cuttable("b/net", 1, LINEAR), metaop_of("c/net", 1, {1: 1.0})
    )
    plan = make_plan(profile, cluster_of(1), micro_batches={"a": 2, "b": 3, "c": 1})
    assert plan.micro_batches == {"a": 2, "b": 3}
    assert sorted((piece.metaop, piece.micro_batch) for piece in plan.slices) == [
        ("a/net", 0),
        ("a/net", 1),
        ("b/net", 0),
        ("b/net", 1),
        ("b/net", 2),
        ("c/net", 0),
    ]
    assert plan.predicted.compute_s == pytest.approx(2 * 0.9 + 3 * 0.7 + 1.0, abs=1e-6)
    assert check_plan(plan, profile) == ()


def test_a_chain_on_two_devices_is_a_pipeline() -> None:
    """Two MetaOps that run on one device each, and hold so much that they have to be apart: while the second
    runs the first micro-batch, the first runs the second one.
    """
    size = 1500 * MIB  # with gradients and optimizer state four times as much
    first = cuttable("t/first", 1, LINEAR, param_bytes_per_op=size // 4)
    second = cuttable("t/second", 1, LINEAR, param_bytes_per_op=size // 4, inputs=("t/first",))
    alone = [each.model_copy(update={"shares": each.shares[2:]}) for each in (first, second)]  # from 3 on
    profile = profile_of(*(each.model_copy(update={"curve": each.curve[:1]}) for each in alone))
    plan = make_plan(profile, cluster_of(2, memory_gib=2.5), micro_batches={"t": 4})
    (a,), (b,) = (
        {piece.devices for piece in plan.slices if piece.metaop == name} for name in profile.by_name
    )
    assert {*a, *b} == {0, 1}
    # 8 passes of each take 4 x 0.6 s; the second device waits for the first forward, the first for the last
    # backward pass behind it: 2.4 + 0.2 + 0.4 s, where one after the other takes 4.8 s.
    assert plan.predicted.compute_s == pytest.approx(3.0, abs=1e-6)
    # Links take microseconds; the simulator knows nothing of how micro-batches were planned.
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=1e-3)
    assert plan.predicted.iteration_s == pytest.approx(3.0, rel=1e-2)


def test_micro_batches_that_are_asked_for_are_planned_together() -> None:
    """One of t beside u takes 6 s on a device each, and all of t 24 s on its own; one after another, each on
    both devices, they take 5 x 3.3 s, and a search over all of them at once may take less.
    """
    t = cuttable("t/net", 1, {1: 3.3, 2: 6.0, 4: 12.0, 8: 24.0})
    u = cuttable("u/net", 1, {1: 3.3, 2: 6.0})
    profile = profile_of(t, u)
    plan = make_plan(profile, cluster_of(2), micro_batches={"t": 4})
    assert 15.0 <= plan.predicted.compute_s <= 16.5 + 1e-6
    assert check_plan(plan, profile) == ()
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=0.01)


def test_micro_batches_that_are_asked_for_are_searched_over_at_once() -> None:
    """Three tasks share a language model. The best plan of one micro-batch, repeated, ends 43 % above the
    bound, as the tasks that stay whole wait for all of them.
    """
    problem = PROBLEMS["micro-batches"]
    profile = Profile.from_data(json.loads(problem.profile_text()), where=problem.name)
    predicted = make_plan(profile, problem.cluster(), effort=0, micro_batches={"t0": 4}).predicted
    assert predicted.lower_bound_s <= predicted.iteration_s <= 1.2 * predicted.lower_bound_s


@pytest.mark.usefixtures("whole_searches")
def test_a_plan_of_micro_batches_that_was_searched_says_what_it_recomputes_itself() -> None:
    problem = replace(PROBLEMS["micro-batches"], memory_gib=9)
    profile = Profile.from_data(json.loads(problem.profile_text()), where=problem.name)
    plan = make_plan(profile, problem.cluster(), effort=0, micro_batches={"t0": 4})
    recomputed = sum(slice_.num_ops for slice_ in plan.slices if slice_.recompute)
    assert plan.notes == (f"Memory asks for recomputed activations of {recomputed} ops.",)
    assert check_plan(plan, profile) == ()


def test_as_many_micro_batches_as_memory_asks_for() -> None:
    """Of 12 samples of 100 MiB: half of them fit beside the parameters, with what gradients take."""
    memory = OpMemory(
        kept_bytes=(0, 1200 * MIB),
        forward_bytes=(0, 1200 * MIB),
        backward_bytes=(0, 0),
        first_backward_bytes=(0, 0),
    )
    net = cuttable("t/net", 1, LINEAR, memory=(memory,), activation_bytes_per_op=1200 * MIB)
    net = net.model_copy(update={"output_bytes": 0, "inner_output_bytes": 1200 * MIB})  # nothing to recompute
    roomy = make_plan(profile_of(net), cluster_of(1, memory_gib=2.0))
    assert roomy.micro_batches == {}
    tight = make_plan(profile_of(net), cluster_of(1, memory_gib=1.0))
    assert tight.micro_batches == {"t": 2}
    assert tight.predicted.peak_memory_bytes[0] < 0.6 * roomy.predicted.peak_memory_bytes[0]
    tighter = make_plan(profile_of(net), cluster_of(1, memory_gib=0.39))
    assert tighter.micro_batches == {"t": 4}


def test_tasks_are_cut_alike_as_far_as_they_can_be() -> None:
    """Of 12 samples, and of 10; of 4; one needs its whole batch."""
    four = {n: 0.3 + 0.1 * n for n in (1, 2, 4)}
    profile = profile_of(
        cuttable("a/net", 1, LINEAR),
        cuttable("b/net", 1, dict.fromkeys((1, 2, 5, 10), 1.0)),
        metaop_of("c/net", 1, {1: 1.0}),
        cuttable("d/net", 1, four),
    )
    assert alike_micro_batches(profile, 1) == {}
    assert alike_micro_batches(profile, 2) == {"a": 2, "b": 2, "d": 2}
    assert alike_micro_batches(profile, 3) == {"a": 3, "b": 2, "d": 2}
    assert alike_micro_batches(profile, 8) == {"a": 6, "b": 5, "d": 4}


def test_rounds_in_which_every_task_has_a_part_are_found() -> None:
    """Two tasks on four devices, 0.2 s and 0.25 for a sample; what the first keeps has to be halved. Cut
    alone it leaves devices idle in the rounds that the other is not in: 2.3 s. Both in two, three samples on
    each device, and two rounds: 2 x 0.95 s.
    """

    def of(name: str, mib: int) -> MetaOpProfile:
        sizes = {"kept_bytes": (0, mib * MIB), "forward_bytes": (0, mib * MIB)}
        memory = OpMemory(**sizes, backward_bytes=(0, 0), first_backward_bytes=(0, 0))
        shares = {n: 0.2 + 0.25 * n for n in (1, 2, 3, 4, 6, 12)}
        net = cuttable(name, 1, shares, memory=(memory,), activation_bytes_per_op=mib * MIB)
        return net.model_copy(update={"output_bytes": 0, "inner_output_bytes": mib * MIB})

    plan = make_plan(profile_of(of("a/net", 1200), of("b/net", 300)), cluster_of(4, memory_gib=0.3))
    assert plan.micro_batches == {"a": 2, "b": 2}
    assert plan.predicted.iteration_s == pytest.approx(1.9, rel=1e-3)


def test_tasks_that_exchange_values_are_cut_alike() -> None:
    producer, consumer = cuttable("a/net", 1, LINEAR), cuttable("b/net", 1, LINEAR, inputs=("a/net",))
    profile = profile_of(producer, consumer)
    assert alike_micro_batches(profile, 2) == {"a": 2, "b": 2}
    with pytest.raises(NoPlanError, match="task 'b' has 1, and task 'a', whose values it exchanges, 2"):
        make_plan(profile, cluster_of(1), micro_batches={"a": 2})
    plan = make_plan(profile, cluster_of(1), micro_batches={"a": 2, "b": 2})
    assert check_plan(plan, profile) == ()


def test_what_cannot_be_cut_is_refused() -> None:
    profile = profile_of(cuttable("a/net", 1, LINEAR), metaop_of("c/loss", 1, {1: 1.0}))
    with pytest.raises(NoPlanError, match="a batch of 12 samples is not cut into 5 equal"):
        make_plan(profile, cluster_of(1), micro_batches={"a": 5})
    with pytest.raises(NoPlanError, match="c/loss: its batch is not cut into micro-batches"):
        make_plan(profile, cluster_of(1), micro_batches={"c": 2})
    with pytest.raises(UsageError, match="'d': the profile has no such task"):
        make_plan(profile, cluster_of(1), micro_batches={"d": 1})


@pytest.mark.parametrize("text", ["a", "a=", "=2", "a=0", "a=-1", "a=1.5", "a=x", "a=²", "a=99999999999"])
def test_numbers_of_micro_batches_are_task_and_count(text: str) -> None:
    with pytest.raises(UsageError, match="expected TASK=COUNT"):
        parse_counts([text])
    with pytest.raises(UsageError, match="named twice"):
        parse_counts(["a=2", "b=3", "a=2"])
    assert parse_counts(["a=2", "b=c=3"]) == {"a": 2, "b=c": 3}


def test_micro_batches_that_do_not_fit_are_not_blamed_on_the_workload() -> None:
    """The batch itself fits two devices, a micro-batch of one sample has room on neither."""
    net = cuttable("t/net", 1, {n: LINEAR[n] for n in (1, 12)}, param_bytes_per_op=100 * MIB)
    with pytest.raises(NoPlanError, match="no plan fits 'test' with these micro-batches: t in 12"):
        make_plan(profile_of(net), cluster_of(1, memory_gib=0.3), micro_batches={"t": 12})


def test_a_number_that_devices_cannot_take_is_passed_over() -> None:
    """Shares of less than 12 samples are known for two devices together alone, and there is one."""
    memory = OpMemory(
        kept_bytes=(0, 600 * MIB),
        forward_bytes=(0, 600 * MIB),
        backward_bytes=(0, 0),
        first_backward_bytes=(0, 0),
    )
    net = cuttable("t/net", 2, {12: 1.5}, memory=(memory,), activation_bytes_per_op=600 * MIB)
    shares = (*shares_of({1: 0.3, 6: 0.5}, tp=2), *net.shares)
    profile = profile_of(net.model_copy(update={"shares": shares}))
    plan = make_plan(profile, cluster_of(1, memory_gib=1.0))
    assert plan.micro_batches == {}
    assert any(piece.recompute for piece in plan.slices)
