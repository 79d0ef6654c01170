"""HAP's alternation, by hand and against trying everything."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from math import ceil

import pytest
from hap_bench.alternate import alternate
from hap_bench.operators import FLOAT_BYTES, MODELS, Kind, Operator
from hap_bench.program import Layout, Moving, Prices, Rule, Step, steps_from
from hap_bench.ratios import best_ratios
from hap_bench.search import START, cheapest
from hap_bench.truth import whole_samples
from hypothesis import given
from hypothesis import strategies as st

from helpers.several_types import cluster_of_types
from spindle_cli.costs.links import per_node, spread_collective_s
from spindle_cli.costs.parameters import (
    ID_BYTES,
    MatrixGradient,
    Summing,
    factors_limit,
    fastest,
    rows_limit,
    seconds_by_way,
)
from spindle_cli.files.cluster import Cluster

CLUSTER = cluster_of_types({"fast": 1, "slow": 1})
EVEN = (0.5, 0.5)


def prices_of(*flops_per_s: float, cluster: Cluster = CLUSTER) -> Prices:
    return Prices(cluster, flops_per_s)


def dense(inputs: int, outputs: int, flops: float | None = None) -> Operator:
    sizes = (inputs * FLOAT_BYTES, outputs * FLOAT_BYTES)
    own = 2.0 * inputs * outputs if flops is None else flops
    return Operator("t/net", Kind.DENSE, own, inputs * outputs * FLOAT_BYTES, *sizes, outputs, inputs)


def price_of(program: tuple[Step, ...], prices: Prices, ratios: tuple[float, ...]) -> float:
    return sum(prices.step_s(step, ratios) for step in program)


def every_program(operators: tuple[Operator, ...], batch_size: int) -> list[tuple[Step, ...]]:
    @cache
    def behind(place: int, layout: Layout) -> list[tuple[Step, ...]]:
        if place == len(operators):
            return [()]
        return [
            (step, *rest)
            for step in steps_from(layout, operators[place], batch_size)
            for rest in behind(place + 1, step.given)
        ]

    return behind(0, START)


OPERATORS = st.builds(
    Operator,
    metaop=st.just("t/net"),
    kind=st.sampled_from(Kind),
    flops=st.floats(1e6, 1e9),
    param_bytes=st.sampled_from([0.0, 1e4, 1e7, 1e9]),
    in_bytes=st.floats(1e2, 1e6),
    out_bytes=st.floats(1e2, 1e6),
)


@given(st.lists(OPERATORS, min_size=1, max_size=4), st.floats(0.05, 0.95))
def test_no_program_is_cheaper_than_the_one_that_is_found(operators: list[Operator], ratio: float) -> None:
    prices, ratios = prices_of(3e12, 1e12), (ratio, 1 - ratio)
    found = cheapest(operators, 64, prices, ratios)
    tried = min(price_of(program, prices, ratios) for program in every_program(tuple(operators), 64))
    assert price_of(found, prices, ratios) == pytest.approx(tried)


@pytest.mark.parametrize(("inputs", "outputs"), [(25088, 4096), (1024, 4096), (4096, 1024)])
def test_factors_are_sent_below_the_limit_of_the_closed_form_and_gradients_above(
    inputs: int, outputs: int
) -> None:
    """Where compute costs nothing, of both on equal shares; latency would speak for factors."""
    links = CLUSTER.links.model_copy(
        update={"inter_node": CLUSTER.links.inter_node.model_copy(update={"latency_us": 0.0})}
    )
    prices = prices_of(1e30, 1e30, cluster=CLUSTER.with_links(links))
    limit = int(factors_limit(outputs, inputs))
    for batch_size, rule in ((limit, Rule.FACTORS), (limit + 1, Rule.DATA)):
        steps = steps_from(Layout.SAMPLES, dense(inputs, outputs), batch_size)
        found = {step.rule: prices.step_s(step, EVEN) for step in steps if step.given is Layout.SAMPLES}
        assert min((Rule.DATA, Rule.FACTORS), key=found.__getitem__) is rule


@pytest.mark.parametrize(("width", "limit"), [(512, 541), (1024, 855), (2048, 1371)])
def test_the_search_over_all_rules_turns_where_the_closed_form_does(width: int, limit: int) -> None:
    """A square map and what takes samples behind it, at 1e13 operations in a second: splits of the map move
    more, and what is computed whole takes longer, on both sides of the limit.
    """
    prices = prices_of(1e13, 1e13)
    behind = Operator("t/behind", Kind.OTHER, 0.0, 0.0, width * FLOAT_BYTES, width * FLOAT_BYTES)

    def collective_s(num_bytes: float, rounds: int) -> float:
        return spread_collective_s(num_bytes, per_node((0, 1), CLUSTER), rounds, CLUSTER)

    ways = {Rule.DATA: Summing.DENSE, Rule.FACTORS: Summing.FACTORS}
    turns = []
    for batch_size in range(limit - 3, limit + 4):
        first, _ = cheapest([dense(width, width), behind], batch_size, prices, EVEN)
        gradient = MatrixGradient(width, width, batch_size)
        seconds = seconds_by_way(gradient, (Summing.FACTORS,), collective_s, 2, 1e13)
        assert ways[first.rule] is fastest(seconds)
        turns.append(first.rule)
    assert {turns[0], turns[-1]} == {Rule.FACTORS, Rule.DATA}


def lookup(words: int, width: int, tokens: int) -> Operator:
    sizes = (words * width * FLOAT_BYTES, tokens * ID_BYTES, tokens * width * FLOAT_BYTES)
    return Operator("t/words", Kind.LOOKUP, float(tokens * width), *sizes, tokens=tokens)


def test_an_embedding_by_rows_moves_a_row_and_an_id_for_each_token() -> None:
    """Of 10 samples of 7 tokens 70 rows of 3 floats of 4 bytes, and 70 ids; whole, 20 rows."""
    moved = {
        step.rule: dict(step.moved)
        for step in steps_from(Layout.SAMPLES, lookup(20, 3, 7), 10)
        if step.given is Layout.SAMPLES
    }
    assert moved == {
        Rule.DATA: {Moving.SUM: 240},
        Rule.TOUCHED: {Moving.GATHER: 70 * 12 + 70 * 4},
        Rule.GATHERED: {Moving.GATHER: 720},
    }
    (step,) = (s for s in steps_from(Layout.SAMPLES, lookup(20, 3, 7), 10) if s.rule is Rule.TOUCHED)
    assert (step.cut_flops, step.whole_flops) == (3 * 10 * 21, 0)


@pytest.mark.parametrize(("words", "width", "tokens"), [(1000, 64, 8), (30000, 256, 128), (50, 1, 1)])
def test_the_search_over_all_rules_gathers_rows_up_to_where_the_closed_form_does(
    words: int, width: int, tokens: int
) -> None:
    """As many samples as there may be, and one more; no latency, which would speak for rows."""
    links = CLUSTER.links.model_copy(
        update={"inter_node": CLUSTER.links.inter_node.model_copy(update={"latency_us": 0.0})}
    )
    prices = prices_of(1e30, 1e30, cluster=CLUSTER.with_links(links))
    size = tokens * width * FLOAT_BYTES
    behind = Operator("t/behind", Kind.OTHER, 1e33, 0.0, size, size)  # too long if whole on all devices
    last = ceil(rows_limit(words, width) / tokens) - 1
    for batch_size, rule in ((last, Rule.TOUCHED), (last + 1, Rule.DATA)):
        first, _ = cheapest([lookup(words, width, tokens), behind], batch_size, prices, EVEN)
        assert first.rule is rule


def test_of_haps_cases_no_embedding_has_more_words_than_tokens() -> None:
    for model in ("bert-base", "bert-moe"):
        words, *_ = MODELS[model]
        assert (words.kind, words.tokens, words.in_bytes) == (Kind.LOOKUP, 128, 512)
        width = words.out_bytes / words.tokens / FLOAT_BYTES
        assert words.tokens * 2048 > rows_limit(round(words.param_bytes / width / FLOAT_BYTES), round(width))


def test_what_rules_and_layouts_move() -> None:
    """A map of 3 inputs and 5 outputs, 60 bytes of parameters, and 10 samples: 120 bytes in, 200 out."""
    moved = {
        (layout, step.rule, step.given): dict(step.moved)
        for layout in Layout
        for step in steps_from(layout, dense(3, 5), 10)
    }
    samples, features, whole = Layout.SAMPLES, Layout.FEATURES, Layout.WHOLE
    assert moved[samples, Rule.DATA, samples] == {Moving.SUM: 60}
    assert moved[samples, Rule.FACTORS, samples] == {Moving.GATHER: 320}
    assert moved[samples, Rule.GATHERED, samples] == {Moving.GATHER: 180}
    assert moved[whole, Rule.COLUMNS, features] == {}
    assert moved[samples, Rule.COLUMNS, features] == {Moving.GATHER: 240}
    assert moved[features, Rule.ROWS, samples] == {Moving.GATHER: 400}
    assert moved[samples, Rule.ROWS, whole] == {Moving.EXCHANGE: 240, Moving.GATHER: 400}
    assert moved[whole, Rule.WHOLE, whole] == {}
    assert moved[whole, Rule.DATA, samples] == {Moving.GATHER: 120, Moving.SUM: 60}
    experts = replace(dense(3, 5), kind=Kind.EXPERTS)
    by_experts = next(s for s in steps_from(samples, experts, 10) if s.rule is Rule.EXPERTS)
    assert by_experts.moved == {Moving.EXCHANGE: 2 * 320}


def test_factors_are_multiplied_of_all_samples() -> None:
    step = next(s for s in steps_from(Layout.SAMPLES, dense(3, 5), 10) if s.rule is Rule.FACTORS)
    assert (step.cut_flops, step.whole_flops) == (2 * 300, 300)  # a forward pass is 10 x 30


def step_of(rule: Rule, operator: Operator) -> Step:
    return next(step for step in steps_from(Layout.SAMPLES, operator, 8) if step.rule is rule)


@pytest.mark.parametrize(
    ("rule", "param_bytes", "ratios"),
    [
        (Rule.DATA, 1.0, (2 / 3, 1 / 3)),  # twice as fast
        (
            Rule.GATHERED,
            1e15,
            (0.5, 0.5),
        ),  # moving is all that counts: none is padded to more than the others
        (Rule.DATA, 1e15, (2 / 3, 1 / 3)),  # a sum moves the same whatever the ratios
    ],
)
def test_ratios_balance_compute_against_padding(
    rule: Rule, param_bytes: float, ratios: tuple[float, ...]
) -> None:
    step = step_of(rule, Operator("t/net", Kind.OTHER, 1e9, param_bytes, 1, 1))
    assert best_ratios([step], prices_of(2e9, 1e9)) == pytest.approx(ratios, abs=1e-6)


@pytest.mark.parametrize(("worth", "ratios"), [(1.9, (0.5, 0.5)), (2.1, (2 / 3, 1 / 3))])
def test_padding_counts_for_every_device(worth: float, ratios: tuple[float, ...]) -> None:
    """From even ratios on, the slow one has c less to compute of each hundredth that the fast one takes over,
    and both have s more to move: of two devices it pays from c = 2 s on.
    """
    step = step_of(Rule.GATHERED, Operator("t/net", Kind.OTHER, 1e9, 1e9, 1, 1))
    moved_s = sum(prices_of(1, 1).moved_s(*each) for each in step.moved.items())
    slow = step.cut_flops / (worth * moved_s)
    assert best_ratios([step], prices_of(2 * slow, slow)) == pytest.approx(ratios, abs=1e-6)


def test_what_every_device_computes_whole_is_less_for_the_fast_one() -> None:
    """600 operations to cut and 300 for each: 300 b + 150 = 600 (1 - b) + 300."""
    step = replace(step_of(Rule.FACTORS, dense(3, 5)), cut_flops=600.0, whole_flops=300.0)
    assert best_ratios([step], prices_of(2, 1)) == pytest.approx((5 / 6, 1 / 6), abs=1e-4)


def test_the_alternation_ends_where_neither_search_nor_ratios_gain() -> None:
    prices = prices_of(2e9, 1e9)
    found = alternate([dense(512, 512, 1e6), dense(512, 4, 1e5)], 64, prices)
    again = cheapest([dense(512, 512, 1e6), dense(512, 4, 1e5)], 64, prices, found.ratios)
    assert price_of(again, prices, found.ratios) >= found.price_s * (1 - 1e-9)
    assert sum(found.ratios) == pytest.approx(1)


@pytest.mark.parametrize(
    ("batch_size", "ratios", "samples"),
    # 10 over two and one: 3.75, 3.75 and 2.5 are 3, 3 and 2, and two more for those that lack most.
    [(10, (0.375, 0.25), (4, 2)), (10, (0.5, 0.0), (5, 0)), (7, (1 / 3, 1 / 3), (3, 2))],
)
def test_ratios_become_whole_samples(
    batch_size: int, ratios: tuple[float, ...], samples: tuple[int, ...]
) -> None:
    assert whole_samples(batch_size, (2, 1), ratios) == samples


@pytest.mark.parametrize(
    ("model", "millions", "flops"),
    # Multiplications and additions of a forward pass of a sample: VGG19's convolutions on 32 x 32 pictures
    # 0.796e9, its dense layers 0.239e9; a token of BERT 12 x 24 x 768^2 in its maps, 12 x 4 x 128 x 768 in
    # its attention and 2 x 768 x 33,280 in its head.
    [("vgg19", 139.6, 1.035e9), ("vit", 85.1, 11.25e9), ("bert-base", 136.2, 28.89e9)],
)
def test_models_have_the_parameters_and_operations_of_what_is_planned(
    model: str, millions: float, flops: float
) -> None:
    operators = MODELS[model]
    assert sum(o.param_bytes for o in operators) / FLOAT_BYTES / 1e6 == pytest.approx(millions, rel=0.002)
    assert sum(o.flops for o in operators) == pytest.approx(flops, rel=0.01)


def test_every_layout_can_be_left() -> None:
    for layout, kind in product(Layout, Kind):
        operator = replace(dense(3, 5), kind=kind)
        assert any(step.given is Layout.SAMPLES for step in steps_from(layout, operator, 4))
