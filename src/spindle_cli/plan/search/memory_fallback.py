"""What to give up when memory runs short: tensor parallelism and recomputation, where they cost least.

A *split* makes MetaOps run with at least so much tensor parallelism. With each, activations are recomputed by
as many ops as it takes, found by halving; where the cluster says how fast devices reach host memory, those
that get there and back behind what is computed are moved there first, which costs nothing (`given_up`).
Splits are tried by their lower bounds, the fastest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from spindle_cli.costs.memory import inner_bytes, slice_activation_bytes
from spindle_cli.costs.offload import hidden_share
from spindle_cli.costs.parameters.blocks import Block, blocks_of
from spindle_cli.costs.parameters.update import optimizer_bytes
from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.search.judge import Judged
from spindle_cli.plan.search.posed import Posed, Posing
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, Profile
from spindle_cli.units import counted

# Shares of all parameters that are split, from the MetaOps that hold most.
SPLIT_SHARES = (0.6, 1.0)
# Recomputation is measured out in so many steps, a power of two.
STEPS = 16
# Of the nodes' memory for activations, what is planned for: devices do not have all alike.
HOST_SHARE = 0.8


@dataclass(frozen=True)
class TightProblem:
    """A problem under some memory fallback. `posing`: what makes others like it."""

    fallback: MemoryFallback
    posed: Posed
    posing: Posing

    @property
    def problem(self) -> Problem:
        """As it is posed."""
        return self.posed.problem


@dataclass(frozen=True)
class TightPlan:
    """A plan under some memory fallback. `step`: of recomputation, where it was measured out in steps."""

    judged: Judged
    tight: TightProblem
    step: int = 0

    @property
    def note(self) -> str | None:
        """What it says of what it gives up."""
        return describe(self.tight.fallback, self.judged.slices)


def splits_in_turn(
    profile: Profile, cluster: Cluster, posing: Posing, within_s: Callable[[], float]
) -> Iterator[TightProblem]:
    """Every split that there is, also none, by their lower bounds; nothing is recomputed yet.

    Args:
        within_s: seconds that what no schedule is shorter than may be left out from, once the first has been
            planned.
    """
    if not cluster.is_mixed:
        yield from splits(profile, cluster, posing)
        return
    none, *others = every_split(profile)
    whole = posing.posed(profile, cluster, none)
    yield TightProblem(none, whole, posing)
    yield from splits(profile, cluster, posing, [each for each in others if whole.least_s(each) < within_s()])


def splits(
    profile: Profile, cluster: Cluster, posing: Posing, some: Iterable[MemoryFallback] | None = None
) -> list[TightProblem]:
    """Every split that there is, also none, or some, by their lower bounds; nothing is recomputed yet."""
    found: list[TightProblem] = []
    for fallback in every_split(profile) if some is None else some:
        try:
            posed = posing.posed(profile, cluster, fallback)
        except NoPlanError:  # an allocation of this degree needs more devices than there are
            continue
        found.append(TightProblem(fallback, posed, posing))
    return sorted(found, key=lambda tight: tight.posed.lower_bound_s)


def every_split(profile: Profile) -> Iterator[MemoryFallback]:
    """Every split that there is, none first."""
    yield MemoryFallback()
    parameters = {metaop.name: metaop.num_ops * metaop.param_bytes_per_op for metaop in profile.metaops}
    for degree in sorted({point.tp for metaop in profile.metaops for point in metaop.curve} - {1}):
        for names in dict.fromkeys(heaviest(parameters, share) for share in SPLIT_SHARES):
            yield MemoryFallback(degree, names)


def recomputing(tight: TightProblem, step: int) -> TightProblem | None:
    """The same with `step` of `STEPS` of all activations not kept on devices; None if it cannot fit so."""
    profile, cluster = tight.problem.profile, tight.problem.cluster
    recompute, offload = given_up(profile, cluster, step / STEPS)
    fallback = replace(tight.fallback, recompute=recompute, offload=offload)
    posed = tight.posing.posed(profile, cluster, fallback)
    if least_bytes(posed.problem) > sum(cluster.usable_bytes):
        return None
    return TightProblem(fallback, posed, tight.posing)


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


def given_up(profile: Profile, cluster: Cluster, share: float) -> tuple[dict[str, int], dict[str, float]]:
    """What is recomputed and moved to host memory so that this share of all activations that can be saved is
    not kept on devices; as `saving` has it.
    """
    return saving(profile.metaops, cluster, share * savable_bytes(profile.metaops))


def savable_bytes(metaops: Sequence[MetaOpProfile]) -> int:
    """Of the activations of some MetaOps, what need not be kept."""
    return sum(metaop.num_ops * _saved_bytes(metaop) for metaop in metaops)


def saving(
    metaops: Sequence[MetaOpProfile], cluster: Cluster, num_bytes: float
) -> tuple[dict[str, int], dict[str, float]]:
    """How many ops of which of these MetaOps recompute, and of which share of its ops a MetaOp's activations
    are moved to host memory, so that so many bytes are not kept on devices, or as many as can be.

    What hides behind computation is moved, as far as nodes have memory for it: MetaOps whose recomputation
    would take longest for what it saves first. What is left to save is recomputed: MetaOps that save most
    bytes for a second of it go first; of the last one, only as many ops as needed.

    Of several types of device a MetaOp may run on any: as much is moved as hides on the one where most does,
    and no more counts as saved than hides on each.
    """
    saved = {metaop.name: _saved_bytes(metaop) for metaop in metaops}
    left = num_bytes
    offload: dict[str, float] = {}
    sure: dict[str, float] = {}
    room = host_room(metaops, cluster)
    for metaop in sorted(metaops, key=_saved_per_second):
        per_op, kept = saved[metaop.name], metaop.activation_bytes_per_op
        if left > 0 and per_op and metaop.num_ops > 1:
            hidden = hidden_of_types(metaop, cluster)
            moved = min(max(hidden), left / (metaop.num_ops * per_op), room / (metaop.num_ops * kept))
            if moved > 0:
                offload[metaop.name] = moved
                sure[metaop.name] = min(moved, *hidden)
                left -= metaop.num_ops * per_op * sure[metaop.name]
                room -= metaop.num_ops * kept * moved
    ops: dict[str, int] = {}
    for metaop in sorted(metaops, key=lambda metaop: -_saved_per_second(metaop)):
        if left <= 0:
            break
        stays = saved[metaop.name] * (1 - sure.get(metaop.name, 0.0))
        if stays >= 1:
            ops[metaop.name] = min(metaop.num_ops, -int(-left // stays))
            left -= ops[metaop.name] * stays
    return ops, offload


def hidden_of_types(metaop: MetaOpProfile, cluster: Cluster) -> tuple[float, ...]:
    """Of a MetaOp's ops, on each type of device that its curve has, the share whose copies hide behind what
    it computes on its fewest devices of the type.
    """
    links = cluster.host_link_of_type
    return tuple(
        0.0
        if (link := links[kind]) is None
        else hidden_share(metaop, point.dp, point.tp, point.forward_s, point.backward_s, link)
        for kind, point in _narrowest_of_types(metaop, cluster).items()
    )


def _narrowest_of_types(metaop: MetaOpProfile, cluster: Cluster) -> dict[str, CurvePoint]:
    """The first point of a MetaOp's curve on each type of device."""
    if not cluster.is_mixed:
        return {cluster.device_type: metaop.curve[0]}
    found: dict[str, CurvePoint] = {}
    for point in metaop.curve:
        if point.device in cluster.types:
            found.setdefault(point.device, point)
    return found


def host_room(metaops: Sequence[MetaOpProfile], cluster: Cluster) -> float:
    """Bytes of activations that all nodes have room for: of one type of device, if each has as many as the
    one with least room; of several, if devices have parts of all by their speed.
    """
    limits: dict[str, int] = {}
    counts = Counter(cluster.type_of[device] for device in cluster.first_device_of)
    for device, limit in zip(cluster.first_device_of, cluster.host_memory_bytes, strict=True):
        kind = cluster.type_of[device]
        if limit is not None:
            limits[kind] = min(limit, limits.get(kind, limit))
    parts = _parts_of_types(metaops, cluster)
    rooms = (limit * counts[kind] / parts[kind] for kind, limit in limits.items() if parts[kind])
    return min(rooms, default=inf) * HOST_SHARE


def _parts_of_types(metaops: Sequence[MetaOpProfile], cluster: Cluster) -> dict[str, float]:
    """Of all that devices compute, the part of each type, if all types work as long."""
    if not cluster.is_mixed:
        return {cluster.device_type: 1.0}
    alone_s = dict.fromkeys(cluster.types, 0.0)
    for metaop in metaops:
        for kind, point in _narrowest_of_types(metaop, cluster).items():
            alone_s[kind] += metaop.num_ops * point.num_devices * point.op_s
    speeds = {kind: cluster.num_of_type[kind] / alone_s[kind] for kind in cluster.types if alone_s[kind] > 0}
    return {kind: speeds.get(kind, 0.0) / sum(speeds.values()) for kind in cluster.types}


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
    parameters: dict[Block, float] = {}
    activations: dict[int, float] = {}
    for node in problem.nodes:
        metaop = node.metaop
        kept = optimizer_bytes(metaop, problem.profile)
        state = kept.state_per_param + kept.whole_state_per_param
        ops = (node.first_op, node.first_op + node.num_ops)
        for op in range(*ops):
            for use in blocks_of(metaop, op):
                known = parameters.get(use.block, 0.0)
                parameters[use.block] = max(known, use.num_bytes + use.trained_bytes * state)
        part = problem.part_of[metaop.name] if problem.orders_passes else 0
        activations[part] = activations.get(part, 0.0) + min(
            point.num_devices
            * slice_activation_bytes(
                metaop, ops, point.dp, point.tp, recompute=point.recompute, offload=point.offload
            )
            for point in node.points
        )
    return sum(parameters.values()) + max(activations.values())


def describe(fallback: MemoryFallback, slices: Sequence[Slice] = ()) -> str | None:
    """What a plan of these slices, under this fallback, says about it; None: nothing."""
    parts = []
    if fallback.split:
        parts.append(f"tensor parallelism of at least {fallback.least_tp} in {len(fallback.split)} MetaOps")
    once = [piece for piece in slices if piece.micro_batch == 0]
    moved = sum(piece.num_offloaded for piece in once)
    if moved:
        parts.append(f"activations of {counted(moved, 'op')} in host memory")
    recomputed = sum(fallback.recompute.values())
    if fallback.offload:
        recomputed = sum(piece.num_recomputed for piece in once)
    if recomputed:
        parts.append(f"recomputed activations of {counted(recomputed, 'op')}")
    return "Memory asks for " + " and ".join(parts) + "." if parts else None
