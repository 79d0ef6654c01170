"""What to give up when memory runs short: tensor parallelism and recomputation of the heaviest MetaOps.

Every combination of a degree, how many MetaOps have it and how many recompute is a problem of its own, with a
lower bound of its own. They are tried by that bound, the fastest first, until no other can be faster than
what has been found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from spindle_cli.cluster import Cluster
from spindle_cli.costs.memory import activation_bytes, op_param_bytes, parameter_block
from spindle_cli.errors import NoPlanError
from spindle_cli.plan.bound import Bound, lower_bound
from spindle_cli.plan.problem import Problem, Thrift, make_problem
from spindle_cli.profile.types import Profile

# Shares of all parameters and of all activations, from the MetaOps that hold most: enough steps to give up
# little more than needed. With tensor parallelism there are more combinations, so fewer steps.
SPLIT_SHARES = (0.6, 1.0)
RECOMPUTED_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FEWER_SHARES = (0.0, 0.5, 1.0)


def thrifty_problems(profile: Profile, cluster: Cluster) -> list[tuple[Thrift, Problem, Bound]]:
    """All that could fit at all, by their lower bounds."""
    found: list[tuple[Thrift, Problem, Bound]] = []
    for thrift in _thrifts(profile):
        try:
            problem = make_problem(profile, cluster, thrift)
        except NoPlanError:  # an allocation of this degree needs more devices than there are
            continue
        if least_bytes(problem) <= sum(cluster.memory_bytes):
            found.append((thrift, problem, lower_bound(problem)))
    return sorted(found, key=lambda item: item[2].lower_bound_s)


def _thrifts(profile: Profile) -> Iterator[Thrift]:
    degrees = sorted({point.tp for metaop in profile.metaops for point in metaop.curve})
    parameters = {m.name: m.num_ops * m.param_bytes_per_op for m in profile.metaops}
    activations = {m.name: m.num_ops * m.activation_bytes_per_op for m in profile.metaops}
    known: set[Thrift] = {Thrift()}
    shares = FEWER_SHARES if len(degrees) > 1 else RECOMPUTED_SHARES
    for degree, split, recomputed in product(degrees, SPLIT_SHARES, shares):
        names = heaviest(parameters, split) if degree > 1 else frozenset()
        thrift = Thrift(degree, names, heaviest(activations, recomputed))
        if thrift not in known:
            known.add(thrift)
            yield thrift


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


def most_thrifty(profile: Profile) -> Thrift:
    """All MetaOps split as far as their curves go, all activations recomputed."""
    names = frozenset(metaop.name for metaop in profile.metaops)
    return Thrift(max(point.tp for metaop in profile.metaops for point in metaop.curve), names, names)


def least_bytes(problem: Problem) -> float:
    """Bytes that all devices together hold at least: every parameter once with its state, and all
    activations.
    """
    state_per_param = problem.profile.optimizer_state_per_param
    parameters: dict[tuple[str, int], float] = {}
    activations = 0.0
    for node in problem.nodes:
        metaop = node.metaop
        state = 1 + metaop.trainable_fraction * (1 + state_per_param)
        for op in range(metaop.num_ops):
            block = parameter_block(metaop, op)
            parameters[block] = max(parameters.get(block, 0.0), op_param_bytes(metaop, op) * state)
        activations += min(
            point.num_devices
            * activation_bytes(metaop, metaop.num_ops, point.dp, point.tp, recompute=point.recompute)
            for point in node.points
        )
    return sum(parameters.values()) + activations


def describe(thrift: Thrift) -> str:
    """What a plan under this thrift says about it."""
    parts = []
    if thrift.split:
        parts.append(f"tensor parallelism of at least {thrift.least_tp} in {len(thrift.split)} MetaOps")
    if thrift.recompute:
        parts.append(f"recomputed activations in {len(thrift.recompute)} MetaOps")
    return "Memory asks for " + " and ".join(parts) + "."
