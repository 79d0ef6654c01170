"""How a plan sums the gradients of a matrix: by a closed rule, which a search over both ways agrees with."""

from __future__ import annotations

import pytest

from helpers.plans import metaop_of, profile_of
from spindle_cli.check.run import check_plan
from spindle_cli.costs.parameters.gradient_sums import factors_limit, rows_limit
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Matrix, Profile
from spindle_cli.simulate.run import simulate

ROWS, COLUMNS = 4096, 1024


def cluster(latency_us: float = 0.0, gb_per_s: float = 1.0, *devices: str) -> Cluster:
    """Two nodes of one device each; CPUs unless told."""
    link = Link(latency_us=latency_us, bandwidth_gb_per_s=gb_per_s)
    nodes = tuple(
        NodeGroup(name=f"{place}", count=1, devices=1, device=kind, memory_gib=4)
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
    metaop = metaop_of("a/m", 1, {2: 0.02}, param_bytes_per_op=num_bytes, activation_bytes_per_op=0)
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
    assert not make_plan(profile("factors", 100, flops_per_op=2.5e8), cluster()).metaops[0].gathered


def test_types_that_round_differently_and_shared_out_parameters_sum_as_they_are() -> None:
    """Of GPUs of two types each would step its copy; what is shared out in passes is summed there."""
    known = profile("rows", 80, optimizer_state_sharded=True)
    sharding = {"a/m": Sharding.PARAMETERS}
    assert not make_plan(known, cluster(), sharding=sharding).metaops[0].gathered
    assert make_plan(known, cluster()).metaops[0].gathered
