"""Bounds with memory and with links: by hand, in order, and below every schedule and plan."""

from __future__ import annotations

from itertools import product
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.cut import cuttable, shares_of
from helpers.examples import examples
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from helpers.several_types import cluster_of_types, on_types
from spindle_cli.check.run import check_plan
from spindle_cli.costs.memory import UNCOUNTED_SHARE
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster, Link
from spindle_cli.plan.best.find import BelowBoundError
from spindle_cli.plan.bound.any_cut import AnyCut
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.types import MetaOpProfile, Profile
from spindle_cli.simulate.run import simulate
from spindle_cli.units import GIB, MIB

# Of links of clusters that helpers make.
INSIDE_S, INSIDE, BETWEEN_S, BETWEEN = 10e-6, 5e9, 20e-6, 1e9
NOTHING = {"param_bytes_per_op": 0, "activation_bytes_per_op": 0}


def with_room(cluster: Cluster, tensor_bytes: float) -> Cluster:
    """A cluster with so many bytes for what is counted on each device."""
    gib = tensor_bytes * (1 + UNCOUNTED_SHARE) / GIB
    return cluster.changed(
        nodes=tuple(group.model_copy(update={"memory_gib": gib}) for group in cluster.nodes)
    )


def with_links(cluster: Cluster, **update: float) -> Cluster:
    links = {
        name: getattr(cluster.links, name).model_copy(update=update) for name in ("intra_node", "inter_node")
    }
    return cluster.changed(links=cluster.links.model_copy(update=links))


def coupled(name: str, seconds: float, **more: Any) -> MetaOpProfile:
    """An op that needs all samples on one device."""
    return metaop_of(name, 1, {1: seconds}, coupled=True, **{**NOTHING, **more})


# Memory.


def test_what_is_kept_for_an_op_of_all_samples_and_does_not_fit_is_computed_again() -> None:
    """Four ops of 1 + 2 s keep 256 MiB each, of which all devices have room for 640: x ops keep their inputs,
    1 / 16 MiB, with 256 (4 - x) + x / 16 = 640.
    """
    net = metaop_of("t/net", 4, {1: 3.0}, activation_bytes_per_op=256 * MIB)
    loss = coupled("t/loss", 0.5, inputs=("t/net",))
    held = 4 * (1 + 2) * MIB  # parameters and state, two bytes for each
    cluster = with_room(cluster_of(1), held + 640 * MIB)
    again = (4 * 256 - 640) / (256 - 1 / 16)
    bounds = AnyCut(profile_of(net, loss), cluster)
    assert bounds.lower_bound_s == pytest.approx(12.5)
    assert bounds.with_memory_s == pytest.approx(12.5 + again * 1.0, rel=1e-6)
    # what is kept of a task without such an op may be gone before the next samples come
    assert AnyCut(profile_of(net), cluster).with_memory_s == pytest.approx(12.0)
    # a host that activations may be moved to takes them all
    to_host = cluster.links.model_copy(update={"host": Link(latency_us=1, bandwidth_gb_per_s=1)})
    moved = AnyCut(profile_of(net, loss), cluster.changed(links=to_host))
    assert moved.with_memory_s == pytest.approx(12.5)


def test_what_takes_longest_is_kept_where_that_is_enough() -> None:
    """As above, but an op that keeps 64 MiB computes a quarter of its forward pass again."""
    pairs = {"forward_bytes": (0, 0), "backward_bytes": (0, 0), "first_backward_bytes": (0, 0)}
    memory = ({"kept_bytes": (0, 256 * MIB), "selective_bytes": (0, 64 * MIB), **pairs},)
    net = metaop_of("t/net", 4, {1: 3.0}, selective_share=0.25, memory=memory)
    loss = coupled("t/loss", 0.5, inputs=("t/net",))
    cluster = with_room(cluster_of(1), 4 * (1 + 2) * MIB + 640 * MIB)
    again = (4 * 256 - 640) / (256 - 64)
    assert AnyCut(profile_of(net, loss), cluster).with_memory_s == pytest.approx(
        12.5 + again * 0.25, rel=1e-6
    )


def test_more_devices_have_more_room_together() -> None:
    """On two devices the same four ops fit, halves of the batch on each."""
    net = metaop_of("t/net", 4, {1: 3.0, 2: 1.5}, activation_bytes_per_op=256 * MIB)
    loss = coupled("t/loss", 0.5, inputs=("t/net",))
    one = with_room(cluster_of(1), 12 * MIB + 640 * MIB)
    two = with_room(cluster_of(2), 12 * MIB + 640 * MIB)
    assert AnyCut(profile_of(net, loss), one).with_memory_s > AnyCut(profile_of(net, loss), one).lower_bound_s
    assert (
        AnyCut(profile_of(net, loss), two).with_memory_s == AnyCut(profile_of(net, loss), two).lower_bound_s
    )


def test_shares_that_no_device_has_room_for_are_none() -> None:
    """An op keeps 8 MiB of a sample, and takes half of that and twice its output besides backward; its
    parameters are a MiB. So 5 samples take less than 62 MiB, and 6 more than 73: of a share of 5 a sample
    takes 1.4 / 5 s, linear between 4 and 8.
    """
    net = cuttable("t/net", 1, {8: 2.0, 4: 1.2, 2: 0.8}, activation_bytes_per_op=64 * MIB)
    bounds = AnyCut(profile_of(net), with_room(cluster_of(1), 67 * MIB))
    assert bounds.lower_bound_s == pytest.approx(2.0)
    assert bounds.with_memory_s == pytest.approx(8 * 1.4 / 5)


def test_each_type_has_room_of_its_own() -> None:
    """The fast device has room for 2 samples of an op at once, the slow one for all."""
    seconds, kept = {8: 2.0, 4: 1.2, 2: 0.8}, {"activation_bytes_per_op": 64 * MIB}
    nets = [cuttable(f"{task}/net", 1, seconds, **kept) for task in "abcd"]
    profile = on_types(profile_of(*nets), {"fast": 1.0, "slow": 3.0})
    cluster = with_room(cluster_of_types({"fast": 1, "slow": 1}), 200 * MIB)
    small = cluster.nodes[0].model_copy(update={"memory_gib": 30 * MIB * (1 + UNCOUNTED_SHARE) / GIB})
    cluster = cluster.changed(nodes=(small, *cluster.nodes[1:]))
    assert cluster.types == ("fast", "slow")
    # x of 32 samples on the fast device: 0.25 x s there, and 0.75 (32 - x) on the other; then 0.4 x
    assert AnyCut(profile, cluster).lower_bound_s == pytest.approx(32 / (1 / 0.25 + 1 / 0.75), rel=1e-3)
    assert AnyCut(profile, cluster).with_memory_s == pytest.approx(32 / (1 / 0.4 + 1 / 0.75), rel=1e-3)


# Links.


def test_sums_of_an_op_over_its_shares_make_it_longer() -> None:
    """A gather of a GB over four devices goes three hops and moves three quarters, forward and backward; the
    op's times have 0.1 s of both.
    """
    gather = BatchSum(kind="gather", num_bytes=10**9, forward=1, backward=1)
    net = metaop_of("t/net", 1, {1: 1.0, 4: 0.2}, batch_sums=(gather,), **NOTHING)
    profile = profile_of(net)
    on_four_s = 2 * (3 * INSIDE_S + 0.75 * 1e9 / INSIDE)
    assert AnyCut(profile, cluster_of(4)).with_links_s == pytest.approx(0.2 + on_four_s)
    point = net.curve[-1].model_copy(update={"communication_s": 0.1})
    known = net.model_copy(update={"curve": (net.curve[0], point)})
    assert AnyCut(profile_of(known), cluster_of(4)).with_links_s == pytest.approx(0.1 + on_four_s)
    # over two nodes a hop of four leaves each of them
    hops_s = 3 * (2 * INSIDE_S + 2 * BETWEEN_S) / 4
    apart = AnyCut(profile, cluster_of(4, devices_per_node=2)).with_links_s
    assert apart == pytest.approx(0.2 + 2 * (hops_s + 0.75 * 1e9 / INSIDE))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_first_parameters_are_summed_behind_the_chain(is_sharded: bool) -> None:
    """A GB goes around two devices twice: half of it each time."""
    net = metaop_of("t/net", 1, {1: 10.0, 2: 1.0}, param_bytes_per_op=10**9)
    profile = profile_of(net).model_copy(update={"optimizer_state_sharded": is_sharded})
    summed_s = 2 * (INSIDE_S + 0.5 * 1e9 / INSIDE)
    assert AnyCut(profile, cluster_of(2)).with_links_s == pytest.approx(1 + summed_s)
    # once for the batches of a step; not of what is not trained, and maybe as rows of an embedding
    two = profile.model_copy(update={"accumulate": 2})
    assert AnyCut(two, cluster_of(2)).with_links_s == pytest.approx(1 + summed_s / 2)
    frozen = net.model_copy(update={"trainable_fraction": 0.25})
    quarter_s = 2 * (INSIDE_S + 0.5 * 0.25e9 / INSIDE)
    some = profile.with_metaops([frozen])
    assert AnyCut(some, cluster_of(2)).with_links_s == pytest.approx(1 + quarter_s)


@pytest.mark.parametrize(("num_bytes", "seconds"), [(10**9, 1.2), (10**10, 2.0)])
def test_a_task_that_may_be_in_micro_batches_runs_on_few_devices_or_sums(
    num_bytes: int, seconds: float
) -> None:
    """One device of two runs all of the micro-batches in 2 s; both do in 1 s, and sum 1 GB in 0.2, or 10."""
    net = cuttable("t/net", 1, {8: 2.0, 4: 1.0}, param_bytes_per_op=num_bytes)
    cluster = with_links(cluster_of(2), latency_us=0)
    bounds = AnyCut(profile_of(net), cluster)
    assert bounds.lower_bound_s == pytest.approx(1.0)
    assert bounds.with_links_s == pytest.approx(seconds, rel=1e-4)
    # Of two ops each may have a device, and neither is summed.
    two = net.model_copy(update={"num_ops": 2})
    assert AnyCut(profile_of(two), cluster).with_links_s == pytest.approx(2.0, rel=1e-4)
    frozen = net.model_copy(update={"trainable_fraction": 0.0})
    assert AnyCut(profile_of(frozen), cluster).with_links_s == bounds.lower_bound_s


@pytest.mark.parametrize("gigabytes", [50, 200])
def test_many_devices_are_told_apart_as_far_as_it_matters(gigabytes: int) -> None:
    """Of 64 samples of 1 s each, 64 / d are on each of d devices; links move 2 (d - 1) / d of all bytes."""
    net = cuttable("t/net", 1, {64: 64.0, 8: 8.0, 1: 1.0}, param_bytes_per_op=gigabytes * 10**9)
    cluster = with_links(cluster_of(64, devices_per_node=64), latency_us=0)
    best_s = min(64 / d + 2 * (d - 1) / d * gigabytes * 1e9 / INSIDE for d in range(1, 65))
    assert 0.98 * best_s <= AnyCut(profile_of(net), cluster).with_links_s <= best_s


def test_micro_batches_that_are_asked_for_bound_what_a_plan_can_be() -> None:
    """Halves of 8 take 1 s on both devices, with a sum of 0.2 s; quarters take 0.75 s each, as do those of
    four micro-batches, one after another. By compute alone bounds are of every cut.
    """
    net = cuttable("t/net", 1, {8: 2.0, 4: 1.0, 2: 0.75}, param_bytes_per_op=10**9)
    cluster = with_links(cluster_of(2), latency_us=0)
    cases = (({"t": 1}, 1, 1.2), ({}, 1, 1.2), ({"t": 2}, 1, 1.2), ({"t": 4}, 1.5, 1.7))
    for counts, memory_s, links_s in cases:
        bounds = AnyCut(profile_of(net), cluster, counts)
        assert bounds.lower_bound_s == pytest.approx(1.0)
        assert bounds.with_memory_s == pytest.approx(memory_s), counts
        assert bounds.with_links_s == pytest.approx(links_s, rel=1e-4), counts


@pytest.mark.parametrize(("param_bytes", "ways"), [(0, 1), (8, 2)])
def test_an_op_of_all_samples_waits_for_what_it_cannot_have_made(param_bytes: int, ways: int) -> None:
    """Of 8 samples of a GB, two are on each of four devices: one receives six, and sends gradients back
    where there are parameters.
    """
    size = {"param_bytes_per_op": param_bytes, "activation_bytes_per_op": 0}
    net = metaop_of("t/net", 1, {1: 80.0, 4: 1.0}, **size)
    net = net.model_copy(update={"output_bytes": 8 * 10**9})
    loss = coupled("t/loss", 0.5, inputs=("t/net",))
    cluster = with_links(cluster_of(4), latency_us=0)
    sums_s = 2 * 0.75 * param_bytes / INSIDE
    bounds = AnyCut(profile_of(net, loss), cluster)
    assert bounds.lower_bound_s == pytest.approx(1.5)
    assert bounds.with_links_s == pytest.approx(1.5 + ways * 6 * 1e9 / INSIDE + sums_s, rel=1e-6)
    # in nodes of two, two samples come from the node, over one link, and four over another
    nodes = with_links(cluster_of(4, devices_per_node=2), latency_us=0)
    sums_s = 2 * 0.75 * param_bytes / INSIDE
    apart_s = max(6e9 / (INSIDE + BETWEEN), 4e9 / BETWEEN)
    assert AnyCut(profile_of(net, loss), nodes).with_links_s == pytest.approx(
        1.5 + ways * apart_s + sums_s, rel=1e-6
    )


def test_free_links_and_ample_memory_add_nothing() -> None:
    gather = BatchSum(kind="gather", num_bytes=10**6, forward=1, backward=1)
    net = metaop_of("t/net", 3, {1: 4.0, 2: 2.1, 4: 1.3})
    loss = metaop_of("t/loss", 1, {1: 1.0, 4: 0.5}, inputs=("t/net",), batch_sums=(gather,))
    free = with_links(cluster_of(4, memory_gib=1000), latency_us=0, bandwidth_gb_per_s=1e9)
    bounds = AnyCut(profile_of(net, loss), free)
    assert bounds.with_memory_s == bounds.lower_bound_s
    assert bounds.with_links_s == pytest.approx(bounds.lower_bound_s, rel=1e-5)
    assert AnyCut(profile_of(net, loss), cluster_of(4)).with_links_s > 1.0001 * bounds.lower_bound_s


# Of random problems.


def any_task(random: Random, task: str) -> tuple[MetaOpProfile, ...]:
    """One or two MetaOps, and most often an op behind them that needs all samples at once."""

    def sizes() -> dict[str, Any]:
        return {
            "param_bytes_per_op": random.choice((0, 8, 10**6, 10**8)),
            "activation_bytes_per_op": random.choice((8, 8 * MIB, 64 * MIB)),
        }

    def curve() -> dict[int, float]:
        fixed_s, work_s = random.uniform(0, 0.05), random.uniform(0.05, 0.5)
        return {n: (fixed_s + work_s / n) * random.uniform(0.8, 1.2) for n in (1, 2, 4, 8)}

    count = random.randint(1, 2)
    names = [f"{task}/net{number}" for number in range(count)]
    nets = []
    for number, name in enumerate(names):
        inputs = tuple(names[:number]) if random.random() < 0.5 else ()
        seconds = curve()
        net = metaop_of(name, random.randint(1, 3), seconds, inputs=inputs, **sizes())
        if random.random() < 0.5:
            net = net.model_copy(update={"shares": shares_of({8 // n: s for n, s in seconds.items()})})
        nets.append(net.model_copy(update={"output_bytes": random.choice((8, 8 * 10**6, 8 * 10**7))}))
    way = random.choice(("none", "coupled", "gather", "sum"))
    if way == "none":
        return tuple(nets)
    if way == "coupled":
        return (*nets, coupled(f"{task}/loss", random.uniform(0.01, 0.1), inputs=tuple(names)))
    num_bytes = random.choice((10**3, 10**7))
    each = BatchSum(kind=way, num_bytes=num_bytes, forward=random.choice((1, 2)), backward=1)
    return (*nets, metaop_of(f"{task}/loss", 1, curve(), inputs=tuple(names), batch_sums=(each,), **sizes()))


def any_cluster(random: Random) -> Cluster:
    num_devices = random.choice((2, 4, 8))
    per_node = random.choice([n for n in (2, 4, 8) if n <= num_devices])
    return cluster_of(num_devices, devices_per_node=per_node, memory_gib=random.choice((0.3, 0.6, 4.0)))


def assert_in_order(bounds: AnyCut) -> None:
    assert 0 < bounds.work_or_chain_s <= bounds.lower_bound_s * (1 + 2e-4)
    assert bounds.lower_bound_s <= min(bounds.with_memory_s, bounds.with_links_s)


@examples(60)
@given(st.integers(0, 10**6))
def test_no_plan_is_below_any_of_them(seed: int) -> None:
    random = Random(seed)
    profile = profile_of(*any_task(random, "a"), *any_task(random, "b"))
    profile = profile.model_copy(update={"optimizer_state_sharded": random.random() < 0.5})
    cluster = any_cluster(random)
    bounds = AnyCut(profile, cluster)
    assert_in_order(bounds)
    try:
        plan = make_plan(profile, cluster, effort=random.choice((0, 1)))
    except NoPlanError:
        return
    assert check_plan(plan, profile) == ()
    predicted = plan.predicted
    assert predicted.lower_bound_any_s == bounds.lower_bound_s
    assert predicted.lower_bound_with_memory_s == bounds.with_memory_s <= predicted.compute_s
    assert predicted.lower_bound_with_links_s == bounds.with_links_s <= predicted.iteration_s
    assert bounds.with_links_s <= simulate(plan).iteration_s * (1 + 1e-9)
    wrong = predicted.model_copy(update={"lower_bound_with_links_s": predicted.iteration_s * 1.001})
    (found,) = check_plan(plan.model_copy(update={"predicted": wrong}))
    assert (found.rule, found.where) == ("lower-bound", "predicted.lower_bound_with_links_s")


@pytest.mark.parametrize("name", ["with_memory_s", "with_links_s"])
def test_a_bound_that_a_plan_contradicts_is_left_out_and_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What it assumes beyond the profile's times is no reason to have no plan."""
    profile, cluster = profile_of(metaop_of("a/net", 2, {1: 2.0, 2: 1.0})), cluster_of(2)
    known = make_plan(profile, cluster)
    monkeypatch.setattr(AnyCut, name, 1.001 * known.predicted.iteration_s)
    plan = make_plan(profile, cluster)
    left_out = {f"lower_bound_{name}": None}
    assert plan.predicted == known.predicted.model_copy(update=left_out)
    (note,) = set(plan.notes) - set(known.notes)
    assert note.startswith(f"The lower bound {name[:-2].replace('_', ' ')}, ")
    assert check_plan(plan, profile) == ()
    monkeypatch.setattr(AnyCut, "lower_bound_s", 1.001 * known.predicted.iteration_s)
    with pytest.raises(BelowBoundError):
        make_plan(profile, cluster)


def every_schedule(profile: Profile, cluster: Cluster) -> list[Plan]:
    """Of a task whose MetaOps follow each other: every number of devices of each, from the first one on,
    with all activations kept or with none.
    """
    numbers = [[point.num_devices for point in metaop.curve] for metaop in profile.metaops]
    possible = [[n for n in own if n <= cluster.num_devices] for own in numbers]
    found = []
    for counts, again in product(product(*possible), product((False, True), repeat=len(possible))):
        waves, start_s = [], 0.0
        for metaop, count, recompute in zip(profile.metaops, counts, again, strict=True):
            piece = slice_of(metaop, (0, metaop.num_ops), range(count), start_s, recompute=recompute)
            start_s = piece.end_s
            waves.append([piece])
        found.append(plan_of(profile, cluster, waves))
    return found


@examples(60)
@given(st.integers(0, 10**6))
def test_of_a_chain_the_best_of_all_schedules_is_not_below_them(seed: int) -> None:
    random = Random(seed)
    task = any_task(random, "a")
    chain = [
        metaop.model_copy(update={"inputs": () if place == 0 else (task[place - 1].name,)})
        for place, metaop in enumerate(task)
    ]
    profile, cluster = profile_of(*chain), any_cluster(random)
    bounds = AnyCut(profile, cluster)
    assert_in_order(bounds)
    best_s = fitting_s = inf
    for plan in every_schedule(profile, cluster):
        compute_s = plan.predicted.compute_s
        if compute_s < best_s:  # else its iteration is no shorter
            best_s = min(best_s, simulate(plan).iteration_s)
        needs = zip(plan.predicted.peak_memory_bytes, cluster.memory_bytes, strict=True)
        if all(need <= room for need, room in needs):
            fitting_s = min(fitting_s, compute_s)
    assert bounds.with_links_s <= best_s * (1 + 1e-9)
    assert bounds.with_memory_s <= fitting_s * (1 + 1e-9)
