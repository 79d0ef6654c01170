"""What is given up where memory is short: how many ops recompute, which MetaOps are split, what is said."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of, slice_of
from spindle_cli.plan.best.posed import ProblemPoser
from spindle_cli.plan.posing import make_problem
from spindle_cli.plan.problem import MemoryFallback
from spindle_cli.plan.search.memory_fallback import (
    describe,
    given_up,
    heaviest,
    largest_fallback,
    least_bytes,
    splits,
)
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile

MIB = 2**20


def net(name: str, num_ops: int, kept_mib: int, forward_s: float = 1.0, **more: Any) -> MetaOpProfile:
    """Ops that keep so much and hand on 1 MiB, on one device or two."""
    sizes = {"activation_bytes_per_op": kept_mib * MIB, "inner_output_bytes": MIB}
    return metaop_of(name, num_ops, {1: 3 * forward_s, 2: 2 * forward_s}, **(sizes | more))


def recomputed_ops_of(profile: Profile, share: float) -> dict[str, int]:
    """Where nothing can be moved to host memory."""
    given = given_up(profile, share)
    assert given == MemoryFallback(recompute=given.recompute)
    return dict(given.recompute)


def test_who_saves_most_for_a_second_recomputes_first_and_the_last_only_as_much_as_needed() -> None:
    """a saves 4 MiB an op for 2 s, b 3 MiB for 1 s, c nothing: 12 + 9 MiB in all."""
    profile = profile_of(net("a/m", 3, 5, 2.0), net("b/m", 3, 4, 1.0), net("c/m", 3, 1))
    assert recomputed_ops_of(profile, 0.0) == {}
    assert recomputed_ops_of(profile, 3 / 21) == {"b/m": 1}
    assert recomputed_ops_of(profile, 3.01 / 21) == {"b/m": 2}
    assert recomputed_ops_of(profile, 9 / 21) == {"b/m": 3}
    assert recomputed_ops_of(profile, 13.1 / 21) == {"b/m": 3, "a/m": 2}
    assert recomputed_ops_of(profile, 1.0) == {"b/m": 3, "a/m": 3}


def test_of_curves_that_begin_with_several_devices_the_seconds_of_all_count() -> None:
    """a saves 4 MiB for 2 x 1 s, b 3 MiB for 1 s."""
    on_two = metaop_of("a/m", 1, {2: 3.0}, activation_bytes_per_op=5 * MIB, inner_output_bytes=MIB)
    assert recomputed_ops_of(profile_of(on_two, net("b/m", 1, 4)), 0.1) == {"b/m": 1}


@pytest.mark.parametrize(
    ("share", "names"), [(0.5, "b"), (0.6, "b"), (0.61, "ba"), (0.9, "ba"), (0.95, "bac"), (1.0, "bac")]
)
def test_the_heaviest_are_taken_until_they_have_the_share(share: float, names: str) -> None:
    assert heaviest({"a": 30, "b": 60, "c": 10, "d": 0}, share) == frozenset(names)


def split(metaop: MetaOpProfile, tp: int) -> MetaOpProfile:
    point = CurvePoint(num_devices=tp, dp=1, tp=tp, forward_s=0.4, backward_s=0.8, source="measured")
    return metaop.model_copy(update={"curve": (*metaop.curve, point)})


def test_each_degree_splits_the_metaops_with_most_parameters_then_all() -> None:
    """Of 3 x 1, 2 x 4 and 1 x 2 MiB the second has 8 of 13."""
    profile = profile_of(
        split(net("a/m", 3, 1), 2),
        split(net("b/m", 2, 1, param_bytes_per_op=4 * MIB), 4),
        split(net("c/m", 1, 1, param_bytes_per_op=2 * MIB), 2),
    )
    found = splits(profile, cluster_of(4), ProblemPoser())
    heavy, everything = frozenset({"b/m"}), frozenset({"a/m", "b/m", "c/m"})
    fallbacks = [(tight.fallback.least_tp, tight.fallback.split) for tight in found]
    assert len(fallbacks) == 5
    assert set(fallbacks) == {(1, frozenset()), (2, heavy), (2, everything), (4, heavy), (4, everything)}
    bounds = [tight.posed_problem.lower_bound_s for tight in found]
    assert bounds == sorted(bounds)


def test_the_largest_fallback_splits_as_far_as_any_curve_goes_and_recomputes_every_op() -> None:
    profile = profile_of(split(net("a/m", 3, 1), 2), split(net("b/m", 2, 1), 4))
    found = largest_fallback(profile)
    assert (found.least_tp, found.split) == (4, {"a/m", "b/m"})
    assert found.recompute == {"a/m": 3, "b/m": 2}


def test_at_least_every_parameter_is_held_once_with_its_state_and_the_activations_of_a_task() -> None:
    """a and b share three blocks of 1 MiB, of which b trains half, and a's first has 2 MiB of glue; a keeps 5
    MiB an op, b 4. Tasks may be run one behind the other.
    """
    a = net("a/m", 3, 5, parameters="p", extra_param_bytes={0: 2 * MIB})
    b = net("b/m", 3, 4, parameters="p", trainable_fraction=0.5)
    problem = make_problem(profile_of(a, b), cluster_of(2))
    assert least_bytes(problem) / MIB == (3 + 1 + 1) * (1 + 2) + 3 * 5
    with_inner = make_problem(profile_of(a, b), cluster_of(2), MemoryFallback(recompute={"a/m": 3}))
    assert least_bytes(with_inner) / MIB == (3 + 1 + 1) * (1 + 2) + 3 * 4


def test_a_plan_says_what_it_gave_up() -> None:
    slices = [
        slice_of(metaop, (0, metaop.num_ops), (0,), 0.0, recompute=True)
        for metaop in (net("a/m", 2, 5), net("b/m", 3, 5))
    ]
    assert describe(slices, MemoryFallback(4, frozenset("ab"))) == (
        "Memory asks for tensor parallelism of at least 4 in 2 MetaOps and recomputed activations of 5 ops."
    )
    assert describe(slices[:1]) == "Memory asks for recomputed activations of 2 ops."
    assert describe([], MemoryFallback(2, frozenset("a"))) == (
        "Memory asks for tensor parallelism of at least 2 in 1 MetaOps."
    )
