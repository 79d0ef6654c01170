"""Plans for several types of device: valid, near the bound, and never slower than the baselines."""

from __future__ import annotations

import pytest
from random_profiles import Shape, random_profile

from helpers.cut import cuttable
from helpers.plans import cluster_of, metaop_of, profile_of
from helpers.several_types import cluster_of_types, metaop_on_types, on_types, profile_on_types
from spindle_cli.check.run import check_plan
from spindle_cli.errors import InputError, NoPlanError, UsageError
from spindle_cli.files.cluster import Cluster, Links
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.bound.bound import lower_bound
from spindle_cli.plan.file import plan_text
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.mixed.alike import as_one_type
from spindle_cli.plan.mixed.dispatch import MixedDispatcher, MixedGuide
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.types import ON_SEVERAL_TYPES, Plan, Slice, StrategyName
from spindle_cli.profile.types import Profile, ShareTime
from spindle_cli.questions.compare import compare
from spindle_cli.questions.explain import explain
from spindle_cli.simulate.run import simulate
from spindle_cli.units import MIB

FAST_AND_SLOW = cluster_of_types({"fast": 1, "slow": 1})


def chain(batch_size: int = 6, slow: float = 2.0) -> Profile:
    return profile_on_types(metaop_on_types("t/net", 2, {"fast": 1.0, "slow": slow}, batch_size=batch_size))


def rows_of(plan: Plan) -> list[tuple[int, ...] | None]:
    return [piece.rows for piece in plan.slices]


def test_a_chain_runs_on_both_types_so_that_they_end_together() -> None:
    plan = make_plan(chain(), FAST_AND_SLOW)
    assert [(piece.devices, piece.rows) for piece in plan.slices] == [((0, 1), (0, 4, 6))]
    assert plan.predicted.compute_s == pytest.approx(8.0)
    assert plan.schema_ == "spindle.plan/2"
    assert check_plan(plan, chain()) == ()


@pytest.mark.parametrize(
    ("strategy", "rows", "compute_s"),
    [("sequential", (0, 4, 6), 8.0), ("dp-even", None, 12.0), ("spindle", (0, 4, 6), 8.0)],
)
def test_strategies_cut_batches_as_they_say(
    strategy: StrategyName, rows: tuple[int, ...] | None, compute_s: float
) -> None:
    plan = make_plan(chain(), FAST_AND_SLOW, strategy)
    assert rows_of(plan) == [rows]
    assert plan.predicted.compute_s == pytest.approx(compute_s)


def test_a_batch_of_fewer_samples_than_devices_leaves_some_out() -> None:
    net = metaop_on_types("t/net", 1, {"fast": 1.0, "slow": 1.0 + 1e-9}, batch_size=3)
    plan = make_plan(profile_on_types(net), cluster_of_types({"fast": 2, "slow": 2}), "dp-even")
    assert [(piece.devices, piece.rows) for piece in plan.slices] == [((0, 2, 3), None)]


def test_shares_by_published_peaks_are_what_the_data_sheets_say() -> None:
    """In float32 an H100 does 3.44 times what an A100 does: of 22 samples beyond one each, 17 and 5."""
    net = metaop_on_types("t/net", 1, {"h100-80gb": 1.0, "a100-80gb": 1.0}, batch_size=24)
    cluster = cluster_of_types({"h100-80gb": 1, "a100-80gb": 1})
    plan = make_plan(profile_on_types(net), cluster, "dp-flops")
    assert rows_of(plan) == [(0, 18, 24)]


def test_two_chains_run_beside_each_other_on_the_type_that_each_loses_least_on() -> None:
    a = metaop_on_types("a/net", 10, {"fast": 1.0, "slow": 1.5}, batch_size=2)
    b = metaop_on_types("b/net", 10, {"fast": 1.0, "slow": 9.0}, batch_size=2)
    plan = make_plan(profile_on_types(a, b), FAST_AND_SLOW)
    slow = {piece.metaop for piece in plan.slices if 1 in piece.devices}
    assert slow == {"a/net"}
    assert plan.predicted.compute_s < 1.08 * plan.predicted.lower_bound_s


@pytest.mark.parametrize("strategy", ["distmm", "optimus"])
def test_strategies_for_one_type_say_so(strategy: StrategyName) -> None:
    with pytest.raises(NoPlanError, match=f"{strategy} plans for devices of one type, .* fast, slow"):
        make_plan(chain(), FAST_AND_SLOW, strategy)
    with pytest.raises(NoPlanError, match="dp-even plans for devices of several types"):
        make_plan(profile_of(metaop_of("t/net", 1, {1: 1.0})), cluster_of(2), "dp-even")


def test_peaks_that_are_not_published_cut_no_batch() -> None:
    with pytest.raises(NoPlanError, match="by which dp-flops cuts batches, is known of fast, slow"):
        make_plan(chain(), FAST_AND_SLOW, "dp-flops")


def test_shares_by_flops_go_by_the_peaks_that_the_cluster_file_gives() -> None:
    """As 0.2 to 0.1, whatever the curves say: of 6 samples beyond one each, 4 and 2; one alone is too few."""

    def given(*tflops: float | None) -> Cluster:
        nodes = zip(FAST_AND_SLOW.nodes, tflops, strict=True)
        groups = tuple(group.model_copy(update={"peak_tflops": peak}) for group, peak in nodes)
        return Cluster(name="given", nodes=groups, links=FAST_AND_SLOW.links)

    net = metaop_on_types("t/net", 2, {"fast": 1.0, "slow": 1.0})
    assert rows_of(make_plan(profile_on_types(net), given(0.2, 0.1), "dp-flops")) == [(0, 5, 8)]
    with pytest.raises(NoPlanError, match="cuts batches, is known of slow"):
        make_plan(profile_on_types(net), given(0.3, None), "dp-flops")


def test_what_plans_for_several_types_do_not_have_is_refused() -> None:
    drifting = chain().model_copy(update={"optimizer_state_sharded": False})
    with pytest.raises(NoPlanError, match="types round differently") as error:
        make_plan(drifting, FAST_AND_SLOW)
    assert "shard_optimizer" in str(error.value.hint)
    alike = chain(slow=1.0).model_copy(update={"optimizer_state_sharded": False})
    with pytest.raises(NoPlanError, match="types round differently"):  # though one type's plan would do
        make_plan(alike, FAST_AND_SLOW, "sequential")
    with pytest.raises(NoPlanError, match=r"none for 't/net'.*types round differently"):
        make_plan(chain(), FAST_AND_SLOW, sharding={"t/net": Sharding.NONE})
    tiny = cluster_of_types({"fast": 1, "slow": 1}, memory_gib=1e-6)
    with pytest.raises(NoPlanError, match=r"memory of 'mixed', neither with .* split, in micro-batches or"):
        make_plan(chain(), tiny)


def test_where_memory_is_short_no_more_is_recomputed_than_fits() -> None:
    """Eight ops keep 64 MiB each for the batch: on both devices each keeps 256 MiB; part is recomputed
    where there is room for half.
    """
    net = metaop_on_types(
        "t/net", 8, {"fast": 1.0, "slow": 1.0 + 1e-9}, batch_size=2, activation_bytes_per_op=2**26
    )
    profile = profile_on_types(net)
    roomy = make_plan(profile, cluster_of_types({"fast": 1, "slow": 1}, memory_gib=3.0))
    reserve = cluster_of_types({"fast": 1, "slow": 1}, memory_gib=3.0).nodes[0].reserve_bytes
    assert not any(piece.recompute for piece in roomy.slices)
    needed = max(roomy.predicted.peak_memory_bytes)
    # A tenth of so little memory is the reserve, and a twentieth is left free: a quarter of the activations
    # lacks room.
    gib = (needed - reserve - 2**26) / 0.85 / 2**30
    tight = make_plan(profile, cluster_of_types({"fast": 1, "slow": 1}, memory_gib=gib))
    recomputed = sum(piece.num_ops for piece in tight.slices if piece.recompute)
    assert 0 < recomputed < 8
    assert any(f"Memory asks for recomputed activations of {recomputed} op" in note for note in tight.notes)
    assert check_plan(tight, profile) == ()
    assert tight.predicted.compute_s > roomy.predicted.compute_s
    assert tight.predicted.lower_bound_s == pytest.approx(roomy.predicted.lower_bound_s)


def in_micro_batches_of(plan: Plan) -> list[tuple[int, tuple[int, ...], tuple[int, ...] | None]]:
    return sorted((piece.micro_batch, piece.devices, piece.rows) for piece in plan.slices)


@pytest.mark.parametrize(
    ("count", "rows", "compute_s"),
    # Of 12 samples at 1 s and 2 s each: 8 and 4, twice 4 and 2, three times 3 and 1.
    [(1, (0, 8, 12), 8.0), (2, (0, 4, 6), 8.0), (3, (0, 3, 4), 9.0)],
)
def test_each_micro_batch_is_cut_over_the_types_so_that_its_shares_end_together(
    count: int, rows: tuple[int, ...], compute_s: float
) -> None:
    net = metaop_on_types("t/net", 1, {"fast": 1.0, "slow": 2.0}, batch_size=12)
    plan = make_plan(profile_on_types(net), FAST_AND_SLOW, micro_batches={"t": count})
    assert in_micro_batches_of(plan) == [(number, (0, 1), rows) for number in range(count)]
    assert plan.predicted.compute_s == pytest.approx(compute_s)
    assert check_plan(plan, profile_on_types(net)) == ()
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=0.01)


def test_where_no_whole_batch_fits_as_few_micro_batches_as_do_are_run() -> None:
    """4 samples of 100 MiB, with what an op needs while it runs, have no room in 0.42 GiB; 2 have."""
    net = metaop_on_types(
        "t/net", 1, {"fast": 1.0, "slow": 2.0}, batch_size=6, activation_bytes_per_op=600 * MIB
    )
    profile = profile_on_types(net)
    cluster = cluster_of_types({"fast": 1, "slow": 1}, memory_gib=0.42 / 0.85)
    plan = make_plan(profile, cluster)
    assert in_micro_batches_of(plan) == [(0, (0, 1), (0, 2, 3)), (1, (0, 1), (0, 2, 3))]
    assert plan.predicted.compute_s == pytest.approx(4.0)
    assert check_plan(plan, profile) == ()
    with pytest.raises(NoPlanError, match="these micro-batches: t in 1"):
        make_plan(profile, cluster, micro_batches={"t": 1})


def test_micro_batches_that_do_not_divide_a_batch_are_refused() -> None:
    with pytest.raises(NoPlanError, match="a batch of 6 samples is not cut into 4 equal micro-batches"):
        make_plan(chain(), FAST_AND_SLOW, micro_batches={"t": 4})
    with pytest.raises(UsageError, match="no such task"):
        make_plan(chain(), FAST_AND_SLOW, micro_batches={"u": 2})


def test_arithmetic_that_a_type_does_not_have_is_refused() -> None:
    net = metaop_on_types("t/net", 1, {"a100-80gb": 1.0, "v100-32gb": 2.0})
    profile = profile_on_types(net).model_copy(update={"environment": {"precision": "bfloat16"}})
    cluster = cluster_of_types({"a100-80gb": 1, "v100-32gb": 1})
    with pytest.raises(InputError, match="'v100-32gb' has no bfloat16, only float16 and float32"):
        make_plan(profile, cluster)
    make_plan(profile.model_copy(update={"environment": {"precision": "float32"}}), cluster)


@pytest.mark.parametrize(
    ("shape", "seed", "counts", "slower"),
    [
        ("towers", 1, {"fast": 4, "slow": 4}, 2.0),
        ("wide", 2, {"fast": 3, "slow": 5}, 1.3),
        ("merging", 3, {"fast": 2, "slow": 4, "older": 2}, 3.7),
        ("towers", 4, {"slow": 6, "fast": 1}, 1.8),
    ],
)
def test_plans_are_valid_and_never_slower_than_the_baselines(
    shape: Shape, seed: int, counts: dict[str, int], slower: float
) -> None:
    times = {"fast": 1.0, "slow": slower, "older": 1.5 * slower}
    profile = on_types(random_profile(seed, shape), {kind: times[kind] for kind in counts})
    cluster = cluster_of_types(counts, devices_per_node=1)
    plan = make_plan(profile, cluster, effort=0)
    assert check_plan(plan, profile) == ()
    predicted = plan.predicted
    assert predicted.lower_bound_any_s is not None
    assert predicted.lower_bound_any_s <= predicted.compute_s
    assert predicted.lower_bound_s <= predicted.compute_s
    for strategy in ON_SEVERAL_TYPES[1:3]:
        other = make_plan(profile, cluster, strategy)
        assert check_plan(other, profile) == ()
        assert predicted.iteration_s <= other.predicted.iteration_s * (1 + 1e-9)


def shared_work() -> Profile:
    """Three tasks, whose batches any number of devices shares."""
    seconds = {16: 8.0, 8: 4.2, 4: 2.2, 2: 1.2, 1: 0.7}
    metaops = [
        metaop
        for task, scale in (("a", 1.0), ("b", 0.6), ("c", 0.3))
        for metaop in (
            cuttable(f"{task}/see", 12, {n: s * scale for n, s in seconds.items()}),
            cuttable(f"{task}/net", 8, seconds, inputs=(f"{task}/see",), parameters="net"),
        )
    ]
    return profile_of(*metaops)


@pytest.mark.parametrize("slower", [1.5, 2.5])
def test_plans_compute_little_longer_than_the_bound(slower: float) -> None:
    profile = on_types(shared_work(), {"fast": 1.0, "slow": slower})
    plan = make_plan(profile, cluster_of_types({"fast": 8, "slow": 8}))
    assert plan.predicted.compute_s <= 1.05 * plan.predicted.lower_bound_s
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=0.03)


def test_more_effort_is_never_worse_and_the_same_inputs_give_the_same_plan() -> None:
    profile, cluster = (
        on_types(shared_work(), {"fast": 1.0, "slow": 2.0}),
        cluster_of_types({"fast": 4, "slow": 4}),
    )
    shorter, longer = (make_plan(profile, cluster, effort=effort) for effort in (0, 1))
    assert longer.predicted.iteration_s <= shorter.predicted.iteration_s
    assert plan_text(make_plan(profile, cluster, effort=0)) == plan_text(shorter)


def test_one_type_under_two_names_plans_as_one() -> None:
    shares_state = shared_work().model_copy(update={"optimizer_state_sharded": True})
    one = make_plan(shares_state, cluster_of(8, devices_per_node=4, memory_gib=4000))
    base = cluster_of(8, devices_per_node=4, memory_gib=4000)
    groups = tuple(
        base.nodes[0].model_copy(update={"count": 1, "device": device}) for device in ("cpu-a", "cpu-b")
    )
    between = [{"groups": ("cpu-a", "cpu-b"), "latency_us": 20, "bandwidth_gb_per_s": 1}]  # what it is anyway
    links = Links.model_validate({**base.links.model_dump(), "between": between})
    cluster = type(base)(name="two names", nodes=groups, links=links)
    profile = on_types(shared_work(), {"cpu-a": 1.0, "cpu-b": 1.0})
    two = make_plan(profile, cluster)
    assert two.slices == one.slices
    assert two.predicted == one.predicted
    assert two.cluster == cluster
    assert check_plan(two, profile) == ()


def test_one_type_under_two_names_keeps_links_of_groups_that_have_none() -> None:
    """Two groups are called by their type, and one link goes to both."""
    node = {"devices": 1, "memory_gib": 400}
    link = {"latency_us": 1, "bandwidth_gb_per_s": 10}
    slower = {"groups": ["cpu-a", "cpu-b"], "latency_us": 7, "bandwidth_gb_per_s": 1}
    among = {"groups": ["cpu-a", "cpu-a"], "latency_us": 9, "bandwidth_gb_per_s": 3}
    cluster = Cluster.from_data(
        {
            "schema": "spindle.cluster/1",
            "name": "two names",
            "nodes": [
                {**node, "device": "cpu-b"},
                {**node, "device": "cpu-a"},
                {**node, "device": "cpu-a", "devices": 2},
                {**node, "device": "cpu-b", "name": "another"},
            ],
            "links": {"intra_node": link, "inter_node": link, "between": [slower, among]},
        },
        where="c.yaml",
    )
    one = as_one_type(cluster)
    assert one.types == ("cpu-b",)
    pairs = [(a, b) for a in range(4) for b in range(a + 1)]
    latencies = [one.link_of_nodes(*pair).latency_us for pair in pairs]
    assert latencies == [cluster.link_of_nodes(*pair).latency_us for pair in pairs]
    assert latencies == [1, 7, 1, 7, 9, 1, 1, 1, 1, 1]
    profile = on_types(shared_work(), {"cpu-a": 1.0, "cpu-b": 1.0})
    assert check_plan(make_plan(profile, cluster), profile) == ()


def test_a_merged_profile_plans_a_cluster_of_one_type_as_its_own_profile_does() -> None:
    profile = on_types(shared_work(), {"cpu": 1.0, "slow": 2.0})
    own = shared_work().model_copy(update={"optimizer_state_sharded": True})
    one, other = make_plan(profile, cluster_of(8)), make_plan(own, cluster_of(8))
    assert (one.slices, one.metaops) == (other.slices, other.metaops)
    assert check_plan(one, profile) == ()
    # Byte for byte, but for the file that the plan says it is of.
    assert plan_text(one.model_copy(update={"profile": other.profile})) == plan_text(other)


def with_first(plan: Plan, **changes: object) -> Plan:
    """A plan whose first slice is another."""
    wave = plan.waves[0]
    first: Slice = wave.slices[0].model_copy(update=changes)
    waves = (wave.model_copy(update={"slices": (first, *wave.slices[1:])}), *plan.waves[1:])
    return plan.model_copy(update={"waves": waves})


def test_check_times_each_share_on_its_own_type() -> None:
    """With the shares turned round the slow device has four samples, which take 8 s an op instead of 4."""
    plan = make_plan(chain(), FAST_AND_SLOW)
    turned = with_first(plan, rows=(0, 2, 6))
    shares = tuple(entry for metaop in chain().metaops for entry in metaop.shares)
    known = turned.metaops[0].model_copy(update={"shares": shares})
    rules = {violation.rule for violation in check_plan(turned.model_copy(update={"metaops": (known,)}))}
    assert rules == {"duration"}


def test_check_knows_no_time_of_a_share_on_a_type_that_has_none() -> None:
    plan = make_plan(chain(), FAST_AND_SLOW)
    (violation,) = check_plan(with_first(plan, rows=(0, 5, 6)))
    assert (violation.rule, violation.devices) == ("allocation", (0,))
    assert "share 0, of 5 samples, tp 1, on a fast" in str(violation)


def test_check_says_once_that_a_tensor_parallel_group_reaches_over_types() -> None:
    plan = make_plan(chain(), FAST_AND_SLOW)
    metaop = plan.metaops[0]
    halves = tuple(
        ShareTime(samples=6, tp=2, forward_s=1.0, backward_s=1.0, source="measured", device=kind)
        for kind in FAST_AND_SLOW.types
    )
    known = metaop.model_copy(update={"shares": (*metaop.shares, *halves)})
    across = with_first(plan, dp=1, tp=2, rows=None).model_copy(update={"metaops": (known,)})
    (found,) = (each for each in check_plan(across) if each.rule not in ("memory", "peak-memory"))
    assert (found.rule, found.devices) == ("tensor-parallel", (0, 1))
    assert found.value == "hold share 0 together, on nodes 0, 1, of fast and slow"
    assert found.expected == "the 2 devices of a tensor-parallel share on one node, of one type"


def test_a_dispatch_waits_for_devices_that_are_much_faster() -> None:
    """b would take 20 times as long on the slow device, which is all that a leaves."""
    a = metaop_on_types("a/net", 1, {"fast": 1.0, "slow": 20.0}, batch_size=1)
    b = metaop_on_types("b/net", 1, {"fast": 1.0, "slow": 20.0}, batch_size=1)
    problem = make_problem(profile_on_types(a, b), FAST_AND_SLOW)
    dispatcher = MixedDispatcher(problem, lower_bound(problem))
    guide = MixedGuide(0.0, 2.0, (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    timed, end_s = dispatcher.run(guide)
    assert end_s == pytest.approx(2.0)
    assert [(start_s, end_s) for _, start_s, end_s in timed] == [(0.0, 1.0), (1.0, 2.0)]
    hasty = MixedGuide(0.0, 1e9, (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    assert dispatcher.run(hasty)[1] == pytest.approx(20.0)
    assert dispatcher.run(hasty, give_up_s=5.0)[1] == float("inf")


def test_what_one_more_device_of_each_type_is_worth_is_told() -> None:
    plan = make_plan(chain(slow=2.0), FAST_AND_SLOW)
    told = explain(plan, chain(), plan_name="plan.yaml").worth
    assert told is not None
    fast, slow = told.of_types
    assert (fast.device, fast.num_devices, slow.device) == ("fast", 1, "slow")
    # One type alone would not shorten it at the margin; with another fast device the shares are 2, 3 and 1
    # samples, 3 s an op, and with another slow one 4, 1 and 1, which take as long as 4 and 2.
    assert (fast.more.lower_bound_s, fast.more.iteration_s) == pytest.approx((6.0, 6.0), rel=1e-3)
    assert (slow.more.lower_bound_s, slow.more.iteration_s) == pytest.approx((8.0, 8.0), rel=1e-3)
    assert told.fewer is not None
    assert told.fewer.lower_bound_s == pytest.approx(12.0)


def test_a_device_of_each_type_is_worth_what_it_shortens_the_bound_by() -> None:
    """Eight ops of a sample each, on f fast devices and s slow ones: 8 / (f + s / 2) s, 4 with one and two;
    by f that falls by 8 / 2^2 s, by s by half as much.
    """
    ops = [metaop_on_types(f"{n}/net", 1, {"fast": 1.0, "slow": 2.0}, batch_size=1) for n in range(8)]
    profile, cluster = profile_on_types(*ops), cluster_of_types({"fast": 1, "slow": 2})
    told = explain(make_plan(profile, cluster), profile, plan_name="plan.yaml").worth
    assert told is not None
    assert told.lower_bound_s == pytest.approx(4.0)
    assert [each.device_value_s for each in told.of_types] == pytest.approx([2.0, 1.0])
    assert told.device_value_s == pytest.approx((2.0 + 2 * 1.0) / 3)
    assert told.device_part == pytest.approx(1.0)


def test_strategies_for_several_types_are_compared() -> None:
    made = compare(chain(), FAST_AND_SLOW)
    assert [each.strategy for each in made.strategies] == list(ON_SEVERAL_TYPES)
    assert made.strategies[0].iteration_s == min(each.iteration_s or 1e9 for each in made.strategies)
