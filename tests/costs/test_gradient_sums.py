"""Dense sums, rows and factors: seconds by hand, and on which side of the closed limits each is chosen."""

from __future__ import annotations

from functools import partial
from math import floor

import pytest

from helpers.plans import cluster_of
from spindle_cli.costs.links import all_gather_s, all_reduce_s, per_node, spread_collective_s
from spindle_cli.costs.parameters import (
    MatrixGradient,
    Summing,
    dense_s,
    factors_limit,
    factors_s,
    fastest,
    ring,
    rows_limit,
    rows_s,
    seconds_by_way,
)

NO_FLOPS = float("inf")  # flop/s of a device to which products cost nothing
WAYS = (Summing.ROWS, Summing.FACTORS)


def chosen(gradient: MatrixGradient, way: Summing, p: int, latency_s: float = 0.0) -> Summing:
    found = seconds_by_way(gradient, (way,), ring(p, latency_s, 1e9), p, NO_FLOPS)
    return fastest(found)


def test_seconds_of_each_way_by_hand() -> None:
    """4 devices, 1 ms, 1,000 bytes/s; 10 x 5 elements of 4 bytes, 6 tokens.

    Dense: 6 steps of 1 ms and 200 / 4 bytes. Rows: 3 of 6 x 24 / 4 = 36. Factors: 3 of
    6 x 60 / 4 = 90, and 3/4 of 2 x 6 x 50 = 600 operations at 900 a second.
    """
    gradient, links = MatrixGradient(10, 5, tokens=6), ring(4, 1e-3, 1000.0)
    assert dense_s(gradient, links) == pytest.approx(6 * (0.001 + 0.050))
    assert rows_s(gradient, links) == pytest.approx(3 * (0.001 + 0.036))
    assert factors_s(gradient, links, 4, 900.0) == pytest.approx(3 * (0.001 + 0.090) + 0.5)


def test_widths_of_gradients_and_factors_count_by_themselves() -> None:
    """Factors of bfloat16 autocast are half as wide as the float32 gradient; ids stay 4 bytes."""
    gradient = MatrixGradient(10, 5, tokens=6, gradient_width=4, factor_width=2)
    assert (gradient.dense_bytes, gradient.rows_bytes, gradient.factors_bytes) == (200, 84, 180)


@pytest.mark.parametrize("p", [2, 3, 8, 64, 10_000])
@pytest.mark.parametrize(("outputs", "inputs", "limit"), [(4096, 25088, 7042), (4096, 1024, 1638)])
def test_the_search_turns_at_the_limit_of_factors(outputs: int, inputs: int, limit: int, p: int) -> None:
    """VGG19's first dense layer and a feed-forward layer: below 2MN / (M + N) factors, above it the sum."""
    assert floor(factors_limit(outputs, inputs)) == limit
    at, beyond = (MatrixGradient(outputs, inputs, tokens) for tokens in (limit, limit + 1))
    assert chosen(at, Summing.FACTORS, p) is Summing.FACTORS
    assert chosen(beyond, Summing.FACTORS, p) is Summing.DENSE


@pytest.mark.parametrize("p", [2, 5, 64])
@pytest.mark.parametrize(("words", "width"), [(30_522, 768), (1000, 1), (50, 16)])
def test_the_search_turns_at_the_limit_of_rows(words: int, width: int, p: int) -> None:
    """Below T (d + 1) = 2 V d rows, above it the sum."""
    limit = floor(rows_limit(words, width))
    if limit == rows_limit(words, width):
        limit -= 1  # at the limit both take as long, and dense is kept
    at, beyond = (MatrixGradient(words, width, tokens) for tokens in (limit, limit + 1))
    assert chosen(at, Summing.ROWS, p) is Summing.ROWS
    assert chosen(beyond, Summing.ROWS, p) is Summing.DENSE


def test_at_the_limit_the_sum_stays_dense() -> None:
    """8 x 8: 8 tokens of factors are 128 elements, and 2 x 64 go around."""
    assert factors_limit(8, 8) == 8
    assert chosen(MatrixGradient(8, 8, 8), Summing.FACTORS, 2) is Summing.DENSE


def test_latency_pays_for_gathers_far_beyond_the_limit() -> None:
    """As latency grows a gather takes half as long as a sum, whatever it moves; with none, bytes decide."""
    gradient = MatrixGradient(4096, 1024, tokens=100_000)
    for way in WAYS:
        assert chosen(gradient, way, 8, latency_s=1e6) is way
        assert chosen(gradient, way, 8, latency_s=0.0) is Summing.DENSE
    links = ring(8, 1e6, 1e9)
    assert dense_s(gradient, links) / rows_s(gradient, links) == pytest.approx(2, rel=1e-3)


def test_more_operations_move_the_limit_down() -> None:
    """2 devices at 1 GB/s: T tokens of 4096 + 1024 elements of 4 bytes take T x 10.24 us, the sum
    16.78 ms, and T x 4.19 Mflop at 1 Tflop/s T x 4.19 us: 1,162 instead of 1,638 tokens.
    """
    for tokens, way in ((1162, Summing.FACTORS), (1163, Summing.DENSE)):
        gradient = MatrixGradient(4096, 1024, tokens)
        assert fastest(seconds_by_way(gradient, WAYS[1:], ring(2, 0.0, 1e9), 2, 1e12)) is way


def test_factors_are_left_out_where_no_speed_is_known_and_nothing_is_asked_of_one_device() -> None:
    gradient, links = MatrixGradient(4096, 25088, tokens=1), ring(2, 0.0, 1e9)
    assert set(seconds_by_way(gradient, WAYS, links, 2, None)) == {Summing.DENSE, Summing.ROWS}
    assert set(seconds_by_way(gradient, (), links, 2, 1e12)) == {Summing.DENSE}
    assert seconds_by_way(gradient, WAYS, links, 1, 1e12) == {Summing.DENSE: 0.0}


def test_a_cluster_gives_the_same_as_a_ring_of_its_slowest_link() -> None:
    """Two CPU nodes: what `all_reduce_s` and `all_gather_s` give for the link between them."""
    cluster = cluster_of(2, devices_per_node=1)
    links = partial(lambda b, r, s: spread_collective_s(b, s, r, cluster), s=per_node(range(2), cluster))
    gradient = MatrixGradient(1000, 100, tokens=300)
    assert dense_s(gradient, links) == all_reduce_s(400_000, range(2), cluster)
    assert rows_s(gradient, links) == all_gather_s(300 * 404, range(2), cluster)
    inter = cluster.links.inter_node
    same = ring(2, inter.latency_s, inter.bandwidth_gb_per_s * 1e9)
    assert dense_s(gradient, same) == pytest.approx(dense_s(gradient, links))
