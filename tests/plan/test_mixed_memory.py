"""What plans for several types of device give up where memory is short: parameters shared out, layers split,
activations recomputed where that costs least.
"""

from __future__ import annotations

import pytest

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.check.run import check_plan
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.cutting.allocations import cuts_on_all, degrees_of
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, OpMemory, Profile, ShareTime
from spindle_cli.simulate.run import simulate
from spindle_cli.units import GIB, MIB

ONE_EACH = cluster_of_types({"fast": 1, "slow": 1})
TIMES = {"fast": 1.0, "slow": 2.0}
PARAMETERS, GRADIENTS = Sharding.PARAMETERS, Sharding.GRADIENTS


def split_by_two(metaop: MetaOpProfile, split_s: float) -> MetaOpProfile:
    """The same with a degree of 2, at which a sample takes so many times as long on each type."""
    shares = [
        ShareTime.model_validate(
            share.model_dump()
            | {"tp": 2, "forward_s": share.forward_s * split_s, "backward_s": share.backward_s * split_s}
        )
        for share in metaop.shares
    ]
    curve = [
        CurvePoint.model_validate(
            point.model_dump()
            | {
                "tp": 2,
                "num_devices": 2 * point.dp,
                "forward_s": point.forward_s * split_s,
                "backward_s": point.backward_s * split_s,
            }
        )
        for point in metaop.curve
    ]
    return metaop.model_copy(update={"shares": (*metaop.shares, *shares), "curve": (*metaop.curve, *curve)})


def heavy(name: str = "t/net", num_ops: int = 4, **more: object) -> MetaOpProfile:
    """Of 300 MiB of parameters an op, which keeps next to nothing else."""
    nothing = dict.fromkeys(("kept_bytes", "forward_bytes", "backward_bytes", "first_backward_bytes"), (0, 0))
    settings = {"param_bytes_per_op": 300 * MIB, "memory": (OpMemory.model_validate(nothing),), **more}
    return metaop_on_types(name, num_ops, TIMES, batch_size=6, **settings)


@pytest.mark.parametrize(("level", "moves"), [(PARAMETERS, 3), (Sharding.KEPT, 2), (GRADIENTS, 2)])
def test_gathers_and_scatters_go_at_the_slowest_link_and_shares_end_together(
    level: Sharding, moves: int
) -> None:
    """Half of an op's 300 MiB over 10 GB/s for each: gathered for forward, and unless it is kept for
    backward, or where gradients alone are shared out once updated; scattered once. One op hides none, nor
    the sum of flags behind its backward pass. Each hop takes 20 us, a sum has two.
    """
    profile = profile_on_types(heavy(num_ops=1))
    plan = make_plan(profile, ONE_EACH, effort=0, sharding={"t/net": level})
    assert plan.sharding == {"t/net": level}
    assert [(piece.devices, piece.rows) for piece in plan.slices] == [((0, 1), (0, 4, 6))]
    assert plan.predicted.iteration_s == pytest.approx(
        4.0 + moves * (150 * MIB / 10e9 + 20e-6) + 40e-6, abs=1e-8
    )
    assert check_plan(plan, profile) == ()
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=0.01)


def test_parameters_are_shared_out_where_memory_asks_for_it() -> None:
    """Whole, 1,000 MiB of parameters and as many of gradients are on both devices."""
    profile = profile_on_types(heavy(num_ops=20, param_bytes_per_op=50 * MIB))
    roomy = make_plan(profile, ONE_EACH, effort=0)
    assert not roomy.sharding
    shared_out = make_plan(profile, ONE_EACH, effort=0, sharding={"t/net": PARAMETERS})
    needed, less = (
        max(plan.predicted.peak_memory_bytes) - ONE_EACH.nodes[0].reserve_bytes
        for plan in (roomy, shared_out)
    )
    assert less < needed - 200 * MIB
    # the reserve is a tenth of so little memory, and a twentieth is left free
    tight = cluster_of_types({"fast": 1, "slow": 1}, memory_gib=(less + 50 * MIB) / 0.85 / GIB)
    plan = make_plan(profile, tight, effort=0)
    assert plan.sharding == {"t/net": PARAMETERS}
    assert any("Memory asks for sharing out the parameters of t/net" in note for note in plan.notes)
    assert check_plan(plan, profile) == ()
    assert plan.predicted.lower_bound_s == roomy.predicted.lower_bound_s
    with pytest.raises(NoPlanError, match="no plan fits 'mixed' with this sharding"):
        make_plan(
            profile,
            cluster_of_types({"fast": 1, "slow": 1}, memory_gib=0.5 * less / GIB),
            effort=0,
            sharding={"t/net": PARAMETERS},
        )


def test_a_component_that_has_no_share_on_all_devices_is_not_shared_out() -> None:
    """Three samples are too few for four devices."""
    few = metaop_on_types("t/net", 1, TIMES, batch_size=3)
    with pytest.raises(NoPlanError, match="sharding of 't/net': t/net has no allocation on all 4 devices"):
        make_plan(
            profile_on_types(few), cluster_of_types({"fast": 2, "slow": 2}), sharding={"t/net": PARAMETERS}
        )


def test_an_allocation_on_all_devices_splits_alike_in_nodes_of_one_type() -> None:
    """Of three devices in a node one is left over by groups of two."""
    a, b = split_by_two(heavy("a/net"), 0.5), split_by_two(heavy("b/net"), 0.5)
    even = cluster_of_types({"fast": 2, "slow": 2})
    found = cuts_on_all([a, b], even)
    assert [{name: (p.dp, p.tp, p.counts, p.rows) for name, p in each.items()} for each in found] == [
        dict.fromkeys(("a/net", "b/net"), (4, 1, (2, 2), (0, 2, 4, 5, 6))),
        dict.fromkeys(("a/net", "b/net"), (2, 2, (2, 2), (0, 4, 6))),
    ]
    assert [set(each) for each in cuts_on_all([a, heavy("c/net")], even)] == [{"a/net", "c/net"}]
    few = metaop_on_types("d/net", 1, TIMES, batch_size=3)
    assert cuts_on_all([a, few], even) == []
    uneven = cluster_of_types({"fast": 3, "slow": 2})
    assert [each["a/net"].tp for each in cuts_on_all([a], uneven)] == [1]


def of_one_node_each(fast: int, slow: int) -> Cluster:
    return cluster_of_types({"fast": fast, "slow": slow})


@pytest.mark.parametrize(
    ("cluster", "least_tp", "degrees"),
    [
        (of_one_node_each(2, 2), 1, (1, 2)),
        (of_one_node_each(2, 2), 2, (2,)),
        (of_one_node_each(2, 2), 4, (2,)),  # the largest that it has
        (of_one_node_each(2, 1), 2, (2,)),  # one type has room
        (of_one_node_each(1, 1), 2, (1, 2)),  # no node has room for two: whole
    ],
)
def test_layers_are_split_by_as_much_as_there_is(
    cluster: Cluster, least_tp: int, degrees: tuple[int, ...]
) -> None:
    assert degrees_of(split_by_two(heavy(), 0.7), cluster, least_tp) == degrees


def test_what_is_split_for_memory_runs_on_groups_alone_and_the_bound_knows() -> None:
    """Split, 8 samples' worth of seconds become 1.5 times as many on each group of two: three times the
    work. Another MetaOp stays as it is.
    """
    net, other = split_by_two(heavy(), 1.5), split_by_two(heavy("u/net"), 1.5)
    profile, cluster = profile_on_types(net, other), of_one_node_each(2, 2)
    posing = ProblemPoser()
    whole = posing.posed(profile, cluster)
    split = posing.posed(profile, cluster, MemoryFallback(2, frozenset({"t/net"})))
    own, others = split.problem.nodes
    assert {point.tp for point in own.points} == {2}
    assert {point.counts for point in own.points} == {(2, 0), (0, 2), (2, 2)}
    assert others.points == whole.problem.nodes[1].points
    assert split.lower_bound_s > 1.5 * whole.lower_bound_s
    best, _ = split.best("spindle", 0)
    assert best is not None
    assert best.prediction.compute_s >= split.lower_bound_s


def test_what_runs_on_all_devices_has_that_column_alone_in_the_bound() -> None:
    """With what the other would take beside it: 24 s of a sample on each type in turn."""
    net, other = heavy("t/net"), heavy("u/net")
    profile = profile_on_types(net, other).sharded({"t/net": PARAMETERS, "u/net": PARAMETERS})
    posed = ProblemPoser().posed(profile, ONE_EACH)
    assert posed.best("spindle", 0)[1]
    assert [len(node.points) for node in posed.problem.nodes] == [1, 1]
    assert posed.lower_bound_s == pytest.approx(8 * 4.0)


def test_the_bound_knows_cuts_that_a_share_which_is_slow_for_its_size_hides() -> None:
    """2 samples take `slow` 7 s, 3 of them 3.5 s: shares of at most so many seconds each are 5 and 1 samples,
    5 s; equal ones, which no other strategy would leave, 3.5 s.
    """
    seconds = {1: 2.0, 2: 7.0, 3: 3.5}
    net = heavy()
    shares = tuple(
        share.model_copy(update={"forward_s": slow_s / 3, "backward_s": slow_s * 2 / 3})
        if share.device == "slow" and (slow_s := seconds.get(share.samples))
        else share
        for share in net.shares
    )
    profile = profile_on_types(net.model_copy(update={"shares": shares})).sharded({"t/net": PARAMETERS})
    posed = ProblemPoser().posed(profile, ONE_EACH)
    assert [node.points[0].rows for node in posed.problem.nodes] == [(0, 5, 6)]
    assert posed.lower_bound_s == pytest.approx(4 * 3.5)
    plan = make_plan(profile, ONE_EACH, effort=0)
    assert [piece.rows for piece in plan.slices] == [None]
    assert plan.predicted.compute_s == pytest.approx(4 * 3.5)


@pytest.mark.parametrize(("split_s", "tp"), [(0.4, 2), (0.6, 1)])
def test_what_is_shared_out_is_split_as_is_fastest(split_s: float, tp: int) -> None:
    """A group of two has twice the samples, of which each takes 0.4 or 0.6 times as long."""
    profile = profile_on_types(split_by_two(heavy(param_bytes_per_op=MIB), split_s))
    profile = profile.sharded({"t/net": PARAMETERS})
    (node,) = make_problem(profile, of_one_node_each(2, 2)).nodes
    assert [point.tp for point in node.points] == [tp]


def recomputing_profile() -> Profile:
    """Two chains that keep 64 MiB an op; of a's an op's forward pass takes a tenth of b's."""
    a = metaop_on_types(
        "t/a", 4, {k: s / 10 for k, s in TIMES.items()}, batch_size=6, activation_bytes_per_op=64 * MIB
    )
    b = metaop_on_types("t/b", 4, TIMES, batch_size=6, activation_bytes_per_op=64 * MIB, inputs=("t/a",))
    return profile_on_types(a, b)


def test_what_saves_most_for_a_second_is_recomputed_first() -> None:
    profile = recomputing_profile()
    tight = cluster_of_types({"fast": 1, "slow": 1}, memory_gib=0.39)
    assert ProblemPoser().posed(profile, tight).best("sequential", 0) == (None, False)
    plan = make_plan(profile, tight, effort=0, micro_batches={"t": 1})
    again = {piece.metaop for piece in plan.slices if piece.num_recomputed}
    assert again == {"t/a"}
    assert check_plan(plan, profile) == ()


def test_a_baseline_without_room_says_nothing_of_memory_where_it_could_not_be_faster() -> None:
    """One after another takes 60 s and each device to hold both chains; side by side they take 30 s and hold
    one each. In 4 GiB nothing fits, and memory is short.
    """
    chains = [
        metaop_on_types(f"{task}/net", 10, {"fast": 3.0, "slow": 3.0}, batch_size=1, param_bytes_per_op=2**28)
        for task in "ab"
    ]
    posed = [
        ProblemPoser().posed(
            profile_on_types(*chains), cluster_of_types({"fast": 1, "slow": 1}, memory_gib=gib)
        )
        for gib in (16.0, 4.0)
    ]
    assert [each.by_baseline("sequential") for each in posed] == [None, None]
    best, is_roomy = posed[0].best("spindle", 0)
    assert best is not None
    assert best.prediction.compute_s == pytest.approx(30.0)
    assert is_roomy
    assert posed[0].best("sequential", 0) == (None, False)
    assert posed[1].best("spindle", 0) == (None, False)
