"""Plans whose devices share out parameters and gradients: what is tried, asked for, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_profiles import SHAPES, random_profile

from helpers.cli import run_spindle
from helpers.cut import cuttable
from helpers.examples import examples
from helpers.plans import cluster_of, curve_of, metaop_of, profile_of
from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.types import Collective
from spindle_cli.api import plan as plan_of_library
from spindle_cli.check.run import check_plan
from spindle_cli.costs.parameters import moved_in_passes
from spindle_cli.errors import NoPlanError, UsageError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.cluster import Cluster, Link, Links
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.best.request import levels_of, parse_levels
from spindle_cli.plan.best.sharding import shardings_to_try
from spindle_cli.plan.cutting.on_all import on_all_devices
from spindle_cli.plan.file import plan_text
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.plan_report import PlanReport
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, OpMemory, Profile
from spindle_cli.simulate.run import simulate
from spindle_cli.units import MIB

GRADIENTS, PARAMETERS, KEPT = Sharding.GRADIENTS, Sharding.PARAMETERS, Sharding.KEPT


def shared(*metaops: MetaOpProfile, **more: Any) -> Profile:
    return profile_of(*metaops).model_copy(update={"optimizer_state_sharded": True, **more})


def net_of(name: str = "t/net", num_ops: int = 10, **more: Any) -> MetaOpProfile:
    """1,000 MiB of parameters that keep nothing else."""
    nothing = dict.fromkeys(("kept_bytes", "forward_bytes", "backward_bytes", "first_backward_bytes"), (0, 0))
    settings = {
        "param_bytes_per_op": 100 * MIB,
        "activation_bytes_per_op": 0,
        "memory": (OpMemory.model_validate(nothing),),
        **more,
    }
    return metaop_of(name, num_ops, {1: 2.0, 2: 1.0}, **settings).model_copy(update={"output_bytes": 0})


def require_sound(plan: Plan, profile: Profile) -> None:
    """As checked, in version 2, each component's slices on the same devices, memory as stated."""
    assert check_plan(plan, profile) == ()
    assert plan.schema_ == "spindle.plan/2"
    for key in plan.sharding:
        names = [each.name for each in plan.metaops if (each.parameters or each.name) == key]
        assert len({(p.devices, p.tp) for p in plan.slices if p.metaop in names and p.tp > 1}) <= 1
        assert len({(frozenset(p.devices), p.tp) for p in plan.slices if p.metaop in names}) == 1
    memory = device_memory(plan.metaops, plan.slices, plan.cluster, plan)
    assert plan.predicted.peak_memory_bytes == pytest.approx([each.total_bytes for each in memory], abs=64)


def test_parameters_are_shared_out_where_memory_is_short() -> None:
    """On two devices 1,000 MiB of parameters, as much of gradients, twice as much of state which they share:
    3,000 MiB and 100 for a sum. Shared out 2,000, with 200 gathered, 200 of gradients and 100 for a scatter.
    """
    profile = shared(net_of())
    for mib, sharding in ((2600, {"t/net": PARAMETERS}), (3200, {})):
        plan = make_plan(profile, cluster_of(2, memory_gib=mib / 1024), effort=0)
        assert plan.sharding == sharding
        assert check_plan(plan, profile) == ()
    with pytest.raises(NoPlanError, match="no plan fits"):
        make_plan(profile, cluster_of(2, memory_gib=2500 / 1024), effort=0)


def test_a_plan_says_what_is_shared_out_and_counts_what_that_takes() -> None:
    profile = shared(net_of())
    plan = make_plan(profile, cluster_of(2, memory_gib=2600 / 1024), effort=0)
    require_sound(plan, profile)
    assert plan.notes[0] == "Memory asks for sharing out the parameters of t/net."
    predicted = plan.predicted
    assert predicted.peak_memory_bytes == (round(2500 * 1.01 * MIB),) * 2
    # 10 ops of 1 s hide all but the first gathers of both passes, and the last scatter
    (piece,) = plan.slices
    moved = moved_in_passes(piece, plan.metaops[0], plan.cluster, plan)
    assert moved is not None
    once_s = 10e-6 + 50 * MIB / 5e9
    assert sum(moved.longer_s(1 / 3, 2 / 3)) == pytest.approx(3 * once_s)
    assert predicted.compute_s == pytest.approx(10.0, abs=1e-6)
    assert predicted.transfer_s == pytest.approx(3 * once_s, abs=1e-6)
    assert predicted.gradient_sum_s < 1e-3  # the losses, and flags
    report = str(PlanReport.of("plan.yaml", plan))
    assert "shared out  parameters of t/net" in report
    assert " 500 MiB optimizer" not in report
    assert "1000 MiB optimizer state" in report


@pytest.mark.parametrize("level", [GRADIENTS, KEPT, PARAMETERS])
def test_the_simulation_agrees_with_what_is_predicted(level: Sharding) -> None:
    """Ops so short that gathers and scatters show."""
    net = net_of().model_copy(update={"curve": curve_of({2: 0.015})})
    plan = make_plan(shared(net), cluster_of(2, memory_gib=16), effort=0, sharding={"t/net": level})
    assert plan.predicted.transfer_s > 0.01
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=0.02)


def test_flags_follow_the_passes_that_gradients_are_summed_in() -> None:
    """Behind the last pass nothing is summed but them, two messages of 100 ms one after the other, as the
    losses' were before it.
    """
    link = Link(latency_us=100_000, bandwidth_gb_per_s=1000)
    cluster = cluster_of(2, memory_gib=16).changed(links=Links(intra_node=link, inter_node=link))
    plan = make_plan(shared(net_of()), cluster, effort=0, sharding={"t/net": GRADIENTS})
    (flags,) = [each for each in simulate(plan).collected if each.kind is Collective.FLAGS]
    assert flags.end_s - flags.start_s == pytest.approx(0.2, rel=1e-3)
    assert simulate(plan).iteration_s == pytest.approx(flags.end_s, rel=1e-6)
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=1e-3)


def test_same_inputs_same_plan() -> None:
    profile, cluster = shared(net_of()), cluster_of(2, memory_gib=2.55)
    assert plan_text(make_plan(profile, cluster)) == plan_text(make_plan(profile, cluster))
    assert profile.sharding == {}


def test_batches_are_cut_too_where_memory_asks_for_it() -> None:
    """Whole, the batch keeps 1,200 MiB a device; of 2,400 MiB parameters leave about none for it."""
    share_s = {n: 0.3 + 0.1 * n for n in (1, 2, 3, 4, 6, 12)}
    memory = OpMemory(
        kept_bytes=(0, 240 * MIB),
        forward_bytes=(0, 240 * MIB),
        backward_bytes=(0, 0),
        first_backward_bytes=(0, 0),
    )
    net = cuttable(
        "t/net",
        10,
        share_s,
        param_bytes_per_op=100 * MIB,
        memory=(memory,),
        activation_bytes_per_op=240 * MIB,
    ).model_copy(update={"output_bytes": 0, "inner_output_bytes": 240 * MIB})  # nothing to recompute
    profile = shared(net)
    plan = make_plan(profile, cluster_of(2, memory_gib=3000 / 1024), effort=0)
    require_sound(plan, profile)
    assert plan.sharding == {"t/net": PARAMETERS}
    assert plan.micro_batches == {"t": 3}
    request = make_plan(profile, cluster_of(2, memory_gib=3000 / 1024), effort=0, micro_batches={"t": 6})
    assert (request.sharding, request.micro_batches) == ({}, {"t": 6})  # in a pipeline, of whole parameters
    assert {piece.num_ops for piece in request.slices} == {5}
    with pytest.raises(NoPlanError, match="with these micro-batches: t in 3 and this sharding: gradients of"):
        make_plan(
            profile,
            cluster_of(2, memory_gib=2),
            effort=0,
            micro_batches={"t": 3},
            sharding={"t/net": GRADIENTS},
        )


def test_micro_batches_that_are_asked_for_are_taken_where_whole_batches_fit_too() -> None:
    share_s = {n: 0.3 + 0.1 * n for n in (1, 2, 3, 4, 6, 12)}
    net = cuttable("t/net", 10, share_s, param_bytes_per_op=100 * MIB, activation_bytes_per_op=0)
    profile = shared(net.model_copy(update={"memory": net_of().memory, "output_bytes": 0}))
    cluster = cluster_of(2, memory_gib=2600 / 1024)
    for counts in ({"t": 3}, {}):
        plan = make_plan(profile, cluster, effort=0, micro_batches=counts)
        request = make_plan(profile, cluster, effort=0, micro_batches=counts, sharding={"t/net": PARAMETERS})
        assert plan.micro_batches == request.micro_batches == counts
        assert plan.predicted.iteration_s <= request.predicted.iteration_s


@pytest.mark.parametrize("num_ops", [1, 5, 11, 14])
def test_no_more_is_recomputed_than_memory_asks_for(num_ops: int) -> None:
    """16 ops that keep 100 MiB on each of two devices; recomputed, nothing. Of 1,600 MiB of parameters 800
    are there, as much of gradients, and 1,600 of state. When the last op but one that is kept runs backward,
    200 are gathered, gradients take 200 and a scatter 100.
    """
    memory = OpMemory(
        kept_bytes=(0, 200 * MIB),
        forward_bytes=(0, 200 * MIB),
        backward_bytes=(0, 0),
        first_backward_bytes=(0, 0),
    )
    net = net_of(num_ops=16, memory=(memory,), activation_bytes_per_op=200 * MIB)
    net = net.model_copy(update={"inner_output_bytes": 0})
    mib = 1.01 * (3200 + (15 - num_ops) * 100 + 500 + 10)
    plan = make_plan(shared(net), cluster_of(2, memory_gib=mib / 1024), effort=0)
    assert plan.sharding == {"t/net": PARAMETERS}
    assert sum(piece.num_ops for piece in plan.slices if piece.recompute) == num_ops
    assert f"recomputed activations of {num_ops} op" in plan.notes[0]


def test_what_is_asked_for_is_planned_with_room_or_without() -> None:
    profile = shared(net_of("a/net"), net_of("b/net"))
    for level in (GRADIENTS, PARAMETERS):
        plan = make_plan(profile, cluster_of(2, memory_gib=16), effort=0, sharding={"b/net": level})
        require_sound(plan, profile)
        assert plan.sharding == {"b/net": level}
        assert all(len(piece.devices) == 2 for piece in plan.slices if piece.metaop == "b/net")
        assert not any("Memory asks" in note for note in plan.notes)


@pytest.mark.parametrize("sharding", [{}, {"t/net": Sharding.OPTIMIZER}])
def test_asking_for_none_is_possible(sharding: dict[str, Sharding]) -> None:
    profile = shared(net_of())
    roomy = make_plan(profile, cluster_of(2, memory_gib=16), effort=0, sharding=sharding)
    assert (roomy.sharding, roomy.schema_) == ({}, "spindle.plan/1")
    with pytest.raises(NoPlanError, match="no plan fits"):
        make_plan(profile, cluster_of(2, memory_gib=2600 / 1024), effort=0, sharding=sharding)


def test_components_of_several_tasks_run_on_all_devices_split_alike() -> None:
    """Split by 2, task a is faster and b slower; together they are faster unsplit, and with c split."""

    def points(name: str, whole_s: float, split_s: float, **more: Any) -> MetaOpProfile:
        times = ((4, 1, whole_s), (2, 2, split_s))
        curve = tuple(
            CurvePoint(num_devices=4, dp=dp, tp=tp, forward_s=s / 3, backward_s=s * 2 / 3, source="measured")
            for dp, tp, s in times
        )
        net = net_of(name, 2, parameters="shared", **more)
        return net.model_copy(update={"curve": (*net.curve, *curve)})

    a, b, c = points("a/net", 1.0, 0.7), points("b/net", 0.5, 0.9), points("c/net", 1.0, 0.5)
    for metaops, tp in (((a,), 2), ((a, b), 1), ((a, b, c), 2)):
        found = on_all_devices(shared(*metaops).sharded({"shared": PARAMETERS}), cluster_of(4))
        assert [[(point.dp, point.tp) for point in each.curve] for each in found.metaops] == [
            [(4 // tp, tp)]
        ] * len(metaops)
    assert on_all_devices(shared(a), cluster_of(4)) == shared(a)
    # groups of two do not lie in nodes of one device each
    narrow = cluster_of(4, devices_per_node=1)
    (only,) = on_all_devices(shared(a).sharded({"shared": PARAMETERS}), narrow).metaops
    assert only.curve[0].tp == 1


def test_what_is_gathered_counts_when_tensor_parallelism_is_chosen() -> None:
    """Unsplit an op takes 0.19 s and its gathers of 800 MiB 0.63 s; split 0.2 s, and half of that."""
    net = net_of("a/net", 2, param_bytes_per_op=800 * MIB)
    curve = [
        CurvePoint(num_devices=4, dp=4 // tp, tp=tp, forward_s=s / 3, backward_s=s * 2 / 3, source="measured")
        for tp, s in ((1, 0.19), (2, 0.2))
    ]
    net = net.model_copy(update={"curve": tuple(curve)})
    for level, tp in ((PARAMETERS, 2), (Sharding.OPTIMIZER, None)):
        (found,) = on_all_devices(shared(net).sharded({"a/net": level}), cluster_of(4)).metaops
        assert [point.tp for point in found.curve] == ([1, 2] if tp is None else [tp])


def test_what_is_tried() -> None:
    """Heaviest first; not what one device alone can run, and of what is not trained no gradients."""
    large, small = net_of("a/large", 3), net_of("a/small", 1)
    frozen = net_of("a/frozen", 9, trainable_fraction=0.0)
    narrow = net_of("a/narrow", 9).model_copy(update={"curve": large.curve[:1]})
    profile = shared(small, large, frozen, narrow)
    assert shardings_to_try(profile, cluster_of(2)) == [
        {"a/frozen": PARAMETERS},
        {"a/small": PARAMETERS, "a/large": PARAMETERS, "a/frozen": PARAMETERS},
        {"a/small": GRADIENTS, "a/large": GRADIENTS},
    ]
    assert shardings_to_try(shared(large), cluster_of(2)) == [
        {"a/large": PARAMETERS},
        {"a/large": GRADIENTS},
    ]
    assert shardings_to_try(profile, cluster_of(1)) == []
    assert shardings_to_try(shared(narrow, frozen), cluster_of(2)) == [{"a/frozen": PARAMETERS}]
    assert shardings_to_try(shared(narrow), cluster_of(2)) == []
    assert shardings_to_try(profile_of(large), cluster_of(2)) == []


def test_what_cannot_be_shared_out_is_refused() -> None:
    cluster = cluster_of(2, memory_gib=16)
    narrow = net_of("a/narrow").model_copy(update={"curve": net_of().curve[:1]})
    profile = shared(net_of(), narrow, net_of("a/frozen", trainable_fraction=0.0))
    with pytest.raises(NoPlanError, match=r"'a/narrow': a/narrow has no allocation on all 2 devices"):
        make_plan(profile, cluster, sharding={"a/narrow": PARAMETERS})
    with pytest.raises(UsageError, match="'nothing': the profile has no such parameters") as refused:
        make_plan(profile, cluster, sharding={"nothing": PARAMETERS})
    assert refused.value.hint == "It has a/frozen, a/narrow, t/net."
    for level in (Sharding.NONE, Sharding.OPTIMIZER, GRADIENTS):
        with pytest.raises(UsageError, match=f"found {level}, but none of these .* trained") as refused:
            make_plan(profile, cluster, sharding={"a/frozen": level})
        assert "a/frozen=parameters" in str(refused.value.hint)
    for level in (Sharding.OPTIMIZER, GRADIENTS):
        with pytest.raises(NoPlanError, match="do not let devices share optimizer state"):
            make_plan(profile_of(net_of()), cluster, sharding={"t/net": level})
    one_degree = net_of().model_copy(update={"parameters": "p"})
    other = one_degree.model_copy(
        update={
            "name": "b/net",
            "curve": (
                CurvePoint(num_devices=2, dp=1, tp=2, forward_s=1.0, backward_s=1.0, source="measured"),
            ),
        }
    )
    with pytest.raises(NoPlanError, match=r"'p': t/net, b/net have none of one degree"):
        make_plan(shared(one_degree, other), cluster, sharding={"p": PARAMETERS})


def test_without_shared_optimizer_state_nothing_is_shared_out() -> None:
    with pytest.raises(NoPlanError, match="no plan fits"):
        make_plan(profile_of(net_of()), cluster_of(2, memory_gib=2600 / 1024), effort=0)


def test_what_does_not_fit_as_requested_is_told_what_would() -> None:
    """Without an answer where nothing does."""
    profile = shared(net_of())
    for mib, way_out in (
        (2600, "It would fit with --shard t/net=parameters."),
        (2400, "Plan without --micro-batches and --shard"),
    ):
        with pytest.raises(NoPlanError, match="with this sharding: gradients of t/net") as raised:
            cluster = cluster_of(2, memory_gib=mib / 1024)
            make_plan(profile, cluster, effort=0, sharding={"t/net": GRADIENTS})
        assert way_out in str(raised.value)


def test_where_nothing_may_be_shared_out_that_is_named_if_it_would_help() -> None:
    """On two devices 2,500 MiB; whole 4,000."""
    setting = "`shard_optimizer: true` under `train`, profiled again"
    for mib, helps in ((2600, True), (2400, False)):
        with pytest.raises(NoPlanError, match="no plan fits") as raised:
            make_plan(profile_of(net_of()), cluster_of(2, memory_gib=mib / 1024), effort=0)
        assert (setting in str(raised.value)) == helps


@pytest.mark.parametrize("text", ["a", "a=", "=parameters", "a=Parameters", "a=3", "a=nothing", ""])
def test_levels_are_keys_and_levels(text: str) -> None:
    with pytest.raises(UsageError, match="expected KEY=LEVEL with a level of none, optimizer"):
        parse_levels([text])
    with pytest.raises(UsageError, match="named twice"):
        parse_levels(["a=gradients", "a=parameters"])
    assert parse_levels(["a=gradients", "b=c=optimizer"]) == {"a": GRADIENTS, "b=c": Sharding.OPTIMIZER}
    with pytest.raises(UsageError, match="sharding of 'a': found 'zero', expected one of none, optimizer"):
        levels_of({"a": "zero"})


def test_the_library_takes_levels_by_name() -> None:
    profile = shared(net_of()).model_copy(update={"device": profile_of(net_of()).device})
    plan = plan_of_library(profile, cluster_of(2, memory_gib=16), effort=0, sharding={"t/net": "gradients"})
    assert plan.sharding == {"t/net": GRADIENTS}


def test_the_command_takes_levels_and_tells_what_takes_memory(tmp_path: Path) -> None:
    profile, cluster, out = tmp_path / "p.json", tmp_path / "c.yaml", tmp_path / "plan.yaml"
    write_json(profile, shared(net_of()))
    write_json(cluster, cluster_of(2, memory_gib=16))
    made = ("plan", str(profile), "--cluster", str(cluster), "-o", str(out), "--effort", "0", "--shard")
    ended = run_spindle(*made, "t/net=gradients", "--json")
    assert ended.code == 0
    report = json.loads(ended.out)
    assert report["sharding"] == {"t/net": "gradients"}
    assert sum(report["memory"].values()) == report["peak_memory_bytes"]
    assert report["memory"]["parameters"] == 1000 * MIB
    assert run_spindle(*made, "t/net").code == 2


@examples(5)
@given(
    st.integers(0, 10**6),
    st.sampled_from(SHAPES),
    st.sampled_from([1, 4]),
    st.sampled_from([(1, 2), (1, 4), (2, 4)]),
    st.sampled_from([GRADIENTS, PARAMETERS]),
)
def test_every_sharding_that_is_tried_makes_a_valid_plan(
    seed: int, shape: Any, most_tp: int, size: tuple[int, int], level: Sharding
) -> None:
    nodes, per_node = size
    profile = random_profile(seed, shape, most_tp=most_tp)
    profile = profile.model_copy(update={"optimizer_state_sharded": True})
    cluster: Cluster = cluster_of(nodes * per_node, devices_per_node=per_node, memory_gib=4000)
    for sharding in shardings_to_try(profile, cluster)[:2]:
        levels = dict.fromkeys(sharding, level)
        plan = make_plan(profile, cluster, effort=0, sharding=levels)
        assert plan.sharding == levels
        require_sound(plan, profile)
