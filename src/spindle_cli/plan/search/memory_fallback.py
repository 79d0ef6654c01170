"""What to give up when memory runs short: tensor parallelism and recomputation, where they cost least.

A *split* makes MetaOps run with at least so much tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from spindle_cli.costs.beyond_curve import Again, saved_bytes, selectively_saved_bytes, share_again
from spindle_cli.costs.memory import slice_activation_bytes
from spindle_cli.costs.parameters import Block, blocks_of, optimizer_bytes
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.search.posed import Posed, Posing
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOpProfile, Profile
from spindle_cli.units import counted

# Shares of all parameters that are split, from the MetaOps that hold most.
SPLIT_SHARES = (0.6, 1.0)
# Where memory is short, the iteration of a plan is longer than the lower bound by at least this share of it.
ABOVE_BOUND = 0.02
# A longer search makes a quick plan that takes more than this many times as long as another no faster.
NEAR = 1.05
# How a note begins of what a plan gives up.
ASKS = "Memory asks for "
# Of the iteration of the best plan known, that, or a shorter one of another kind of plan: what is not faster
# may be left out.
OrLessS: TypeAlias = Callable[[float], float]


@dataclass(frozen=True)
class Split:
    """Layers that are split, and the problem with these."""

    fallback: MemoryFallback
    posed_problem: Posed


def itself(known_s: float) -> float:
    """Where there is no other kind of plan."""
    return known_s


def may_be_faster(posed_problem: Posed, than_s: float) -> bool:
    """Whether a plan of a problem that memory is short for may take less than so long."""
    return than_s == inf or posed_problem.lower_bound_s * (1 + ABOVE_BOUND) < than_s


def splits(profile: Profile, cluster: Cluster, posing: Posing, within_s: float = inf) -> list[Split]:
    """Every split that there is, by their lower bounds, behind none; nothing is recomputed yet.

    Args:
        within_s: splits that have no schedule as short as that may be left out.
    """
    none, *others = every_split(profile)
    whole = posing.posed(profile, cluster, none)
    all_splits: list[Split] = []
    for fallback in others:
        if whole.least_s(fallback) >= within_s:
            continue
        try:
            posed_problem = posing.posed(profile, cluster, fallback)
        except NoPlanError:  # an allocation of this degree needs more devices than there are
            continue
        all_splits.append(Split(fallback, posed_problem))
    return [Split(none, whole), *sorted(all_splits, key=lambda split: split.posed_problem.lower_bound_s)]


def every_split(profile: Profile) -> Iterator[MemoryFallback]:
    """Every split that there is, none first."""
    yield MemoryFallback()
    parameters = {metaop.name: metaop.num_ops * metaop.param_bytes_per_op for metaop in profile.metaops}
    for degree in sorted({point.tp for metaop in profile.metaops for point in metaop.curve} - {1}):
        for names in dict.fromkeys(heaviest(parameters, share) for share in SPLIT_SHARES):
            yield MemoryFallback(degree, names)


def may_fit(problem: Problem) -> bool:
    """Whether all devices together have room for what any plan holds."""
    return least_bytes(problem) <= sum(problem.cluster.usable_bytes)


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


def given_up(profile: Profile, share: float, whole: Collection[str] = ()) -> MemoryFallback:
    """What is recomputed so that this share of all activations that can be saved is not kept on devices; as
    `saving` has it.
    """
    return saving(profile.metaops, share * savable_bytes(profile.metaops), whole)


def savable_bytes(metaops: Sequence[MetaOpProfile]) -> int:
    """Return the bytes of activations of some MetaOps that need not be kept."""
    return sum(metaop.num_ops * saved_bytes(metaop) for metaop in metaops)


def saving(metaops: Sequence[MetaOpProfile], num_bytes: float, whole: Collection[str] = ()) -> MemoryFallback:
    """How many ops of which of these MetaOps recompute, so that so many bytes are not kept on devices, or as
    many as can be: what saves most bytes for a second of it first, a MetaOp's ops but for what takes longest,
    or the rest of them; of the last one, only as many ops as needed.

    Args:
        whole: names of MetaOps whose ops are recomputed whole or not at all, as those are that tensor
            parallelism splits.
    """
    left = num_bytes
    ways = [way for metaop in metaops for way in _ways(metaop, is_whole=metaop.name in whole)]
    again: dict[str, int] = {}
    selective: dict[str, int] = {}
    for way in sorted(ways, key=lambda way: -way.per_second):
        name = way.metaop.name
        if left <= 0:
            break
        if way.saved_bytes < 1:
            continue
        count = min(way.metaop.num_ops, -int(-left // way.saved_bytes))
        left -= count * way.saved_bytes
        if way.again is Again.SELECTIVE:
            selective[name] = count
        else:
            again[name] = count
            if name in selective:
                selective[name] -= count
    return MemoryFallback(
        recompute=again, selective={name: count for name, count in selective.items() if count}
    )


@dataclass(frozen=True)
class _Way:
    """One way for an op to keep less, or less than in the way before; `seconds`: of all devices."""

    metaop: MetaOpProfile
    again: Again
    saved_bytes: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.saved_bytes / max(self.seconds, 1e-12)


def selects(metaop: MetaOpProfile) -> bool:
    """Whether a MetaOp's ops may be recomputed but for what takes longest."""
    return selectively_saved_bytes(metaop) > 0 and any(point.tp == 1 for point in metaop.curve)


def _ways(metaop: MetaOpProfile, *, is_whole: bool) -> list[_Way]:
    """What saves most for a second first: to keep what takes longest, then nothing; or nothing at once."""
    narrowest = metaop.curve[0]
    forward_s, saved = narrowest.num_devices * narrowest.forward_s, saved_bytes(metaop)
    at_once = _Way(metaop, Again.ALL, saved, forward_s)
    if is_whole or not selects(metaop):
        return [at_once]
    part, again_s = selectively_saved_bytes(metaop), forward_s * share_again(metaop, selective=True)
    first = _Way(metaop, Again.SELECTIVE, part, again_s)
    rest = _Way(metaop, Again.ALL, saved - part, forward_s - again_s)
    return [first, rest] if first.per_second > rest.per_second else [at_once]


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
    parameters: dict[Block, float] = {}
    activations: dict[int, float] = {}
    for node in problem.nodes:
        metaop = node.metaop
        kept = optimizer_bytes(metaop, problem.profile)
        state = kept.state_per_param + kept.whole_state_per_param
        ops = (node.first_op, node.first_op + node.num_ops)
        for op in range(*ops):
            for use in blocks_of(metaop, op):
                earlier = parameters.get(use.block, 0.0)
                parameters[use.block] = max(earlier, use.num_bytes + use.trained_bytes * state)
        part = problem.part_of[metaop.name]
        activations[part] = activations.get(part, 0.0) + min(
            point.num_devices
            * slice_activation_bytes(
                metaop,
                ops,
                point.dp,
                point.tp,
                recompute=point.recompute,
                selective=point.selective,
            )
            for point in node.points
        )
    return sum(parameters.values()) + max(activations.values())


def describe(slices: Sequence[Slice], fallback: MemoryFallback | None = None) -> str | None:
    """What a plan of these slices, under a fallback, says of what memory asks for; None: nothing."""
    parts = []
    if fallback is not None and fallback.split:
        parts.append(f"tensor parallelism of at least {fallback.least_tp} in {len(fallback.split)} MetaOps")
    once = [slice_ for slice_ in slices if slice_.micro_batch == 0]
    moved = sum(slice_.num_offloaded for slice_ in once)
    if moved:
        parts.append(f"activations of {counted(moved, 'op')} in host memory")
    recomputed = sum(slice_.num_recomputed for slice_ in once)
    if recomputed:
        part = _selectively(recomputed, sum(slice_.num_recomputed for slice_ in once if slice_.selective))
        parts.append(f"recomputed activations of {counted(recomputed, 'op')}{part}")
    return ASKS + " and ".join(parts) + "." if parts else None


def _selectively(recomputed: int, selective: int) -> str:
    """Say of how many ops what takes longest is kept, as part of a note."""
    if not selective:
        return ""
    which = "all" if selective == recomputed else f"{selective}"
    return f", {which} of them but for what takes longest"
