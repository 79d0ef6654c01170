"""How a plan sums the gradients of a matrix: by a closed rule, which a search over both ways agrees with."""

from __future__ import annotations

import pytest

from helpers.plans import metaop_of, profile_of
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.check.run import check_plan
from spindle_cli.costs.parameters import factors_limit, rows_limit
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.sums.choose import with_sums
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Matrix, Profile, ShareTime
from spindle_cli.simulate.run import simulate

ROWS, COLUMNS = 4096, 1024


def cluster(latency_us: float = 0.0, gb_per_s: float = 1.0, *devices: str, memory_gib: float = 4) -> Cluster:
    """Two nodes of one device each; CPUs unless told."""
    link = Link(latency_us=latency_us, bandwidth_gb_per_s=gb_per_s)
    nodes = tuple(
        NodeGroup(name=f"{place}", count=1, devices=1, device=kind, memory_gib=memory_gib)
        for place, kind in enumerate(devices or ("cpu", "cpu"))
    )
    return Cluster(name="two", nodes=nodes, links=Links(intra_node=link, inter_node=link))


def profile(way: str, tokens: int, flops_per_op: float | None = None, **numbers: object) -> Profile:
    """One op with a matrix of 4096 x 1024 and nothing else, which two devices run in half the time."""
    num_bytes = ROWS * COLUMNS * 4
    matrix = Matrix(
        op=0,
        parameter="a.m.weight",
        way="rows" if way == "rows" else "factors",
        outputs=ROWS,
        inputs=COLUMNS,
        num_bytes=num_bytes,
        tokens=tokens,
    )
    metaop = metaop_of("a/m", 1, {1: 1.0, 2: 0.02}, param_bytes_per_op=num_bytes, activation_bytes_per_op=0)
    metaop = metaop.model_copy(update={"matrices": (matrix,), "flops_per_op": flops_per_op})
    return profile_of(metaop).model_copy(update={"optimizer_state_sharded": False, **numbers})


def iteration_s(made: Plan) -> float:
    return made.predicted.iteration_s


@pytest.mark.parametrize(
    ("way", "limit"), [("rows", rows_limit(ROWS, COLUMNS)), ("factors", factors_limit(ROWS, COLUMNS))]
)
def test_the_search_over_both_ways_agrees_with_the_closed_limit(way: str, limit: float) -> None:
    """T = 8,184 and 1,638 tokens of 4096 x 1024, where a product costs next to nothing: two below and above
    (a share has whole tokens), predicted and simulated.
    """
    for tokens, gains in ((2 * int(limit / 2) - 2, True), (2 * int(limit / 2) + 2, False)):
        known = profile(way, tokens, flops_per_op=1e15)
        dense, gathered = (make_plan(known, cluster(), sums=each) for each in ("dense", way))
        assert (iteration_s(gathered) < iteration_s(dense)) == gains
        simulated = [simulate(each).iteration_s for each in (gathered, dense)]
        assert (simulated[0] < simulated[1]) == gains


def test_what_gains_is_gathered_by_default_and_said_in_the_plan() -> None:
    known = profile("rows", 80)
    made, dense = make_plan(known, cluster()), make_plan(known, cluster(), sums="dense")
    (metaop,) = made.metaops
    assert metaop.gathered == known.metaops[0].matrices
    assert iteration_s(made) < 0.7 * iteration_s(dense)
    assert made.predicted.lower_bound_s == dense.predicted.lower_bound_s
    assert made.profile == dense.profile
    assert not check_plan(made, known)
    assert not dense.metaops[0].gathered


def test_where_nothing_gains_the_plan_is_the_dense_one() -> None:
    """Too many tokens; links so fast that the sum is under 1 % of the iteration; no such matrices."""
    for known, links in (
        (profile("rows", 9000), cluster()),
        (profile("rows", 80), cluster(gb_per_s=1000)),
        (
            profile("rows", 80).with_metaops(
                [profile("rows", 80).metaops[0].model_copy(update={"matrices": ()})]
            ),
            cluster(),
        ),
    ):
        assert make_plan(known, links) == make_plan(known, links, sums="dense")


def test_latency_speaks_for_a_gather() -> None:
    """9,000 tokens are too many for bytes; at 10 ms a message one gather is faster than a sum."""
    assert make_plan(profile("rows", 9000), cluster(latency_us=10_000)).metaops[0].gathered


def test_factors_need_a_known_speed_and_pay_for_their_product() -> None:
    """A forward pass of 1e9 operations in 20/3 ms on two devices, 7.5e10 in a second each: 100 tokens of
    4096 x 1024 take 4.2e8 operations, 5.6 ms, beyond what their own 50 do, and 1.0 ms instead of 16.8.
    """
    assert not make_plan(profile("factors", 100), cluster()).metaops[0].gathered
    made = make_plan(profile("factors", 100, flops_per_op=1e9), cluster())
    (matrix,) = made.metaops[0].gathered
    assert matrix.flops_per_s == pytest.approx(1e9 / 2 / (0.02 / 3))
    assert made.predicted.optimizer_s == pytest.approx(100 * ROWS * COLUMNS / matrix.flops_per_s)
    assert simulate(made).iteration_s == pytest.approx(iteration_s(made))
    assert not make_plan(profile("factors", 100, flops_per_op=2.5e8), cluster()).metaops[0].gathered


def test_a_product_is_as_fast_as_on_the_slowest_of_what_uses_the_matrix() -> None:
    """Two tasks share it: one of 1e9 operations in the time in which the other does 4e9."""
    slow = profile("factors", 50, flops_per_op=1e9).metaops[0]
    fast = slow.model_copy(update={"name": "b/m", "task": "b", "flops_per_op": 4e9})
    known = profile_of(fast, slow).model_copy(update={"optimizer_state_sharded": False})
    made = make_plan(known, cluster(), sums="factors", strategy="sequential")
    found = {matrix.flops_per_s for metaop in made.metaops for matrix in metaop.gathered}
    assert sorted(found) == [pytest.approx(1e9 / 2 / (0.02 / 3))]


def speed_of_products(made: Plan, known: Profile) -> float | None:
    """What products of factors are said to reach on the devices of a plan."""
    request: list[Profile] = []

    def make(gathering: Profile) -> Plan:
        request.append(gathering)
        return make_plan(gathering, cluster(), sums="dense")

    with_sums(made, known, "factors", make)
    return request[0].metaops[0].gathered[0].flops_per_s


def test_a_product_without_a_measured_speed_is_as_fast_as_the_slowest_types_published_peak() -> None:
    known = profile("factors", 50, environment={"precision": "fp16-autocast"})
    made = make_plan(known, cluster(), sums="dense")
    assert speed_of_products(made, known) is None  # a CPU has no published peak
    alike = made.model_copy(update={"cluster": cluster(0, 1, "v100-32gb", "v100-32gb")})
    assert speed_of_products(alike, known) == 125e12
    nodes = (*alike.cluster.nodes, alike.cluster.nodes[0].model_copy(update={"name": "2", "device": "p100"}))
    more = made.model_copy(update={"cluster": alike.cluster.changed(nodes=nodes)})
    assert speed_of_products(more, known) == 21.2e12


def test_a_product_is_as_fast_as_a_device_of_a_tensor_parallel_share() -> None:
    """1e9 operations on two devices in 20/3 ms; of a share of half the batch on two more, in 1/75 s."""
    known = profile("factors", 50, flops_per_op=1e9)
    made = make_plan(known, cluster(), sums="dense")
    (metaop,) = made.metaops
    half = metaop.batch_size // 2
    share = ShareTime(samples=half, tp=2, forward_s=1 / 75, backward_s=0.1, source="measured")
    split = made.model_copy(update={"metaops": (metaop.model_copy(update={"shares": (share,)}),)})
    assert speed_of_products(made, known) == pytest.approx(1e9 / 2 / (0.02 / 3))
    assert speed_of_products(split, known) == pytest.approx(1e9 / 2 / 2 * 75)


def test_types_that_round_differently_and_shared_out_parameters_sum_as_they_are() -> None:
    """Of GPUs of two types each would step its copy; what is shared out in passes is summed there."""
    num_bytes = ROWS * COLUMNS * 4
    for way in ("rows", "factors"):
        (matrix,) = profile(way, 80).metaops[0].matrices
        net = metaop_on_types("a/m", 1, {"fast": 0.01, "slow": 0.02}, param_bytes_per_op=num_bytes)
        typed = profile_on_types(net.model_copy(update={"matrices": (matrix,), "flops_per_op": 1e9}))
        gpus = cluster_of_types({"fast": 1, "slow": 1})
        assert not make_plan(typed, gpus).metaops[0].gathered
        with pytest.raises(NoPlanError, match=rf"--sums {way}: .*, on devices that round differently"):
            make_plan(typed, gpus, sums=way)
    known = profile("rows", 80, optimizer_state_sharded=True)
    sharding = {"a/m": Sharding.PARAMETERS}
    assert not make_plan(known, cluster(), sharding=sharding).metaops[0].gathered
    with pytest.raises(NoPlanError, match=r"--sums rows: .* shares out gradients or parameters"):
        make_plan(known, cluster(), sharding=sharding, sums="rows")
    assert make_plan(known, cluster()).metaops[0].gathered


def test_what_cannot_be_gathered_as_requested_is_refused() -> None:
    """A profile that names none of that kind; devices of two nodes without room for a state held whole."""
    with pytest.raises(NoPlanError, match=r"--sums factors: .* names no matrix"):
        make_plan(profile("rows", 80), cluster(), sums="factors")
    tight = cluster(memory_gib=68.1e6 / 2**30)  # 67.8 with half of the state, 68.5 with all of it and rows
    known = profile("rows", 80, optimizer_state_sharded=True)
    assert not make_plan(known, tight).metaops[0].gathered
    with pytest.raises(NoPlanError, match=r"--sums rows: with 1 matrices gathered as rows, .* step whole"):
        make_plan(known, tight, sums="rows")


def test_by_default_a_plan_that_gathers_is_taken_only_if_it_is_faster() -> None:
    """The rule looks at sums alone; what is planned in the end may hide them behind compute, or not fit."""
    known = profile("rows", 80)
    dense, gathering = make_plan(known, cluster(), sums="dense"), make_plan(known, cluster(), sums="rows")
    for factor, is_taken in ((0.98, True), (0.995, False), (1.1, False)):
        iteration = factor * iteration_s(dense)
        predicted = gathering.predicted.model_copy(update={"iteration_s": iteration})
        other = gathering.model_copy(update={"predicted": predicted})
        made = with_sums(dense, known, "auto", lambda _, other=other: other)
        assert (iteration_s(made) == iteration) == is_taken


def test_a_metaop_whose_allocations_all_split_it_is_summed_as_it_is() -> None:
    """What gathers it is left with no allocation of it, and that is no reason to plan nothing."""
    known = profile("rows", 80)
    none = known.with_metaops([known.metaops[0].model_copy(update={"curve": ()})])
    with pytest.raises(NoPlanError, match="none of its allocations leaves it whole"):
        make_problem(none, cluster())
    dense = make_plan(known, cluster(), sums="dense")
    assert with_sums(dense, known, "auto", lambda _: make_plan(none, cluster())) is dense


def test_it_is_planned_once_more_where_the_plans_own_slices_gain_half_of_what_is_asked_for() -> None:
    """The sum of 16.78 MB over 1 GB/s, 16.78 ms, hides behind the front's backward pass of 40 ms: a gather of
    0.1 ms gains nothing. Behind passes that are 0.25 and 0.2 ms shorter than it, these are left of iterations
    of 45.1 ms: 0.55 and 0.44 %.
    """
    planned: list[Profile] = []

    def plan_again(gathering: Profile) -> Plan:
        planned.append(gathering)
        raise NoPlanError("nothing fits")

    sum_s = ROWS * COLUMNS * 4 / 1e9
    shown = []
    for backward_s in (0.04, sum_s - 0.00025, sum_s - 0.0002, 0.001):
        known = behind_a_front(profile("rows", 80), backward_s)
        dense = make_plan(known, cluster(), sums="dense", strategy="sequential")
        shown.append(dense.predicted.gradient_sum_s / iteration_s(dense))
        planned.clear()
        assert with_sums(dense, known, "auto", plan_again) is dense
        assert bool(planned) == (shown[-1] > 0.005)
    assert [share > 0.005 for share in shown] == [False, True, False, True]


def behind_a_front(known: Profile, backward_s: float) -> Profile:
    """A profile's MetaOp behind another one without parameters, which runs backward so long on two."""
    (last,) = known.metaops
    front = metaop_of("a/front", 1, {1: 10.0, 2: 1.5 * backward_s}, param_bytes_per_op=0)
    return known.with_metaops([front, last.model_copy(update={"inputs": ("a/front",)})])
