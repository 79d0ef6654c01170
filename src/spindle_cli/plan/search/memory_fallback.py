"""What to give up when memory runs short: tensor parallelism and recomputation, where they cost least.

A *split* makes MetaOps run with at least so much tensor parallelism. With each, activations are recomputed by
as many ops as it takes, found by halving. Splits are tried by their lower bounds, the fastest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from spindle_cli.costs.memory import inner_bytes, op_param_bytes, parameter_block, slice_activation_bytes
from spindle_cli.costs.update import optimizer_bytes
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.bound.bound import Bound, lower_bound
from spindle_cli.plan.problem import MemoryFallback, Problem, make_problem
from spindle_cli.profile.types import MetaOpProfile, Profile

# Shares of all parameters that are split, from the MetaOps that hold most.
SPLIT_SHARES = (0.6, 1.0)
# Recomputation is measured out in so many steps, a power of two.
STEPS = 16


@dataclass(frozen=True)
class TightProblem:
    """A problem under some memory fallback, with its bound."""

    fallback: MemoryFallback
    problem: Problem
    bound: Bound


def splits(profile: Profile, cluster: Cluster) -> list[TightProblem]:
    """Every split that there is, also none, by their lower bounds; nothing is recomputed yet."""
    found: list[TightProblem] = []
    for fallback in _splits(profile):
        try:
            problem = make_problem(profile, cluster, fallback)
        except NoPlanError:  # an allocation of this degree needs more devices than there are
            continue
        found.append(TightProblem(fallback, problem, lower_bound(problem)))
    return sorted(found, key=lambda tight: tight.bound.lower_bound_s)


def _splits(profile: Profile) -> Iterator[MemoryFallback]:
    yield MemoryFallback()
    parameters = {metaop.name: metaop.num_ops * metaop.param_bytes_per_op for metaop in profile.metaops}
    for degree in sorted({point.tp for metaop in profile.metaops for point in metaop.curve} - {1}):
        for names in dict.fromkeys(heaviest(parameters, share) for share in SPLIT_SHARES):
            yield MemoryFallback(degree, names)


def recomputing(tight: TightProblem, step: int) -> TightProblem | None:
    """The same with `step` of `STEPS` of all activations recomputed; None if even so it cannot fit."""
    profile, cluster = tight.problem.profile, tight.problem.cluster
    fallback = replace(tight.fallback, recompute=recomputed_ops(profile, step / STEPS))
    problem = make_problem(profile, cluster, fallback)
    if least_bytes(problem) > sum(cluster.usable_bytes):
        return None
    return TightProblem(fallback, problem, lower_bound(problem))


def heaviest(num_bytes: Mapping[str, int], share: float) -> frozenset[str]:
    """Names that hold most, until they have this share of all bytes."""
    wanted = share * sum(num_bytes.values())
    names: set[str] = set()
    covered = 0
    for name in sorted(num_bytes, key=lambda name: (-num_bytes[name], name)):
        if covered >= wanted:
            break
        names.add(name)
        covered += num_bytes[name]
    return frozenset(names)


def recomputed_ops(profile: Profile, share: float) -> dict[str, int]:
    """How many ops of which MetaOps recompute so that this share of all activations is not kept.

    MetaOps that save most bytes for a second of recomputation go first; of the last one, only as many as
    needed.
    """
    saved = {metaop.name: _saved_bytes(metaop) for metaop in profile.metaops}
    left = share * sum(metaop.num_ops * saved[metaop.name] for metaop in profile.metaops)
    ops: dict[str, int] = {}
    for metaop in sorted(profile.metaops, key=lambda metaop: -_saved_per_second(metaop)):
        if left <= 0:
            break
        per_op = saved[metaop.name]
        if per_op:
            ops[metaop.name] = min(metaop.num_ops, -int(-left // per_op))
            left -= ops[metaop.name] * per_op
    return ops


def _saved_bytes(metaop: MetaOpProfile) -> int:
    return max(0, metaop.activation_bytes_per_op - inner_bytes(metaop))


def _saved_per_second(metaop: MetaOpProfile) -> float:
    narrowest = metaop.curve[0]
    return _saved_bytes(metaop) / max(narrowest.num_devices * narrowest.forward_s, 1e-12)


def largest_fallback(profile: Profile) -> MemoryFallback:
    """All MetaOps split as far as their curves go, all activations recomputed."""
    return MemoryFallback(
        max(point.tp for metaop in profile.metaops for point in metaop.curve),
        frozenset(metaop.name for metaop in profile.metaops),
        {metaop.name: metaop.num_ops for metaop in profile.metaops},
    )


def least_bytes(problem: Problem) -> float:
    """Bytes that all devices together hold at least at some time: every parameter once with its optimizer
    state, and the activations of all tasks; where passes may have an order of their own, those of the part of
    the MetaGraph that keeps most.
    """
    parameters: dict[tuple[str, int], float] = {}
    activations: dict[int, float] = {}
    for node in problem.nodes:
        metaop = node.metaop
        kept = optimizer_bytes(metaop, problem.profile)
        state = 1 + metaop.trainable_fraction * (kept.state_per_param + kept.whole_state_per_param)
        ops = (node.first_op, node.first_op + node.num_ops)
        for op in range(*ops):
            block = parameter_block(metaop, op)
            parameters[block] = max(parameters.get(block, 0.0), op_param_bytes(metaop, op) * state)
        part = problem.part_of[metaop.name] if problem.orders_passes else 0
        activations[part] = activations.get(part, 0.0) + min(
            point.num_devices
            * slice_activation_bytes(metaop, ops, point.dp, point.tp, recompute=point.recompute)
            for point in node.points
        )
    return sum(parameters.values()) + max(activations.values())


def describe(fallback: MemoryFallback) -> str:
    """What a plan under this fallback says about it."""
    parts = []
    if fallback.split:
        parts.append(f"tensor parallelism of at least {fallback.least_tp} in {len(fallback.split)} MetaOps")
    if fallback.recompute:
        parts.append(f"recomputed activations of {sum(fallback.recompute.values())} ops")
    return "Memory asks for " + " and ".join(parts) + "."
