"""The best plan on a cluster of several types of device: of whole batches, or of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import ShardingOf
from spindle_cli.plan.best.asked import Asked
from spindle_cli.plan.best.find import Found, find, find_in, in_best_micro_batches, require_above
from spindle_cli.plan.best.micro_batches import MicroBatched, in_micro_batches
from spindle_cli.plan.mixed.baselines import baseline
from spindle_cli.plan.mixed.bound import MixedBound, mixed_bound
from spindle_cli.plan.mixed.parts import on_best_part
from spindle_cli.plan.mixed.problem import make_mixed_problem
from spindle_cli.plan.mixed.search import search
from spindle_cli.plan.problem import MemoryFallback, Problem
from spindle_cli.plan.schedule import Draft
from spindle_cli.plan.search.judge import Judged, best_of, judge
from spindle_cli.plan.search.listing import to_pieces
from spindle_cli.plan.search.passes_apart import apart, with_passes_apart
from spindle_cli.plan.strategies.spindle import NO_SEARCH
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile

# What `spindle` compares itself with.
BASELINES: tuple[StrategyName, ...] = ("sequential", "dp-even", "dp-flops")
BASE_EFFORT = 12_000


def require_possible(
    profile: Profile, cluster: Cluster, sharding: ShardingOf | None, *, offload: bool
) -> None:
    """Refuse what plans for several types of device do not have.

    Raises:
        NoPlanError: shared-out parameters, activations in host memory, or sets of tasks; or every device
            updates its own copies.
    """
    asked = {
        "parameters that are shared out": bool(sharding),
        "activations in host memory": offload,
        "sets of tasks (train.sampling)": bool(profile.task_sets),
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise NoPlanError(
                f"{what}: {cluster.name!r} has devices of several types ({', '.join(cluster.types)}), whose "
                "plans run all tasks, and share out optimizer state alone",
                hint="Plan without, or for the devices of one type.",
            )
    if not cluster.is_cpu and not profile.optimizer_state_sharded:
        types = ", ".join(cluster.types)
        raise NoPlanError(
            f"{cluster.name!r} has devices of several types ({types}), each of which would "
            "update its own copy of a parameter: types round differently, and the copies would drift apart",
            hint="Let one device update each: `shard_optimizer: true` under `train`, and profile again.",
        )


def find_on_types(whole: Problem, asked: Asked, bound: MixedBound) -> Found | None:
    """The best plan that is asked for; where memory is short also of those of micro-batches, as many as
    memory asks for. None if nothing fits.

    Args:
        whole: of whole batches, without recomputing any ops.
        bound: its own.

    Raises:
        NoPlanError: the strategy has no plan on these types, or a task cannot be cut so.
        BelowBoundError: a bug of the planner.
    """
    profile = whole.profile
    planner = _CutPlanner(profile, whole.cluster, asked.strategy, asked.effort)
    if asked.micro_batches is not None:
        return find_in(planner.cut(asked.micro_batches), planner)
    found = find_in_memory(whole, asked.strategy, asked.effort, bound)
    if found is not None and not found.is_short:
        return found
    # Devices of several types share no batch equally.
    return in_best_micro_batches(profile, 1, planner, found, None)


@dataclass(frozen=True)
class _CutPlanner:
    """Plans micro-batches on devices of several types."""

    profile: Profile
    cluster: Cluster
    strategy: StrategyName
    effort: int

    def cut(self, counts: Mapping[str, int]) -> MicroBatched:
        return in_micro_batches(self.profile, counts, self.cluster, make_mixed_problem)

    def quickly(self, cut: MicroBatched) -> Judged | None:
        strategy = "sequential" if self.strategy == "spindle" else self.strategy
        return judge(cut.first, baseline(cut.first, strategy))

    def searched(self, cut: MicroBatched) -> Found | None:
        return find_in_memory(cut.first, self.strategy, self.effort, mixed_bound(cut.first))


def find_in_memory(whole: Problem, strategy: StrategyName, effort: int, bound: MixedBound) -> Found | None:
    """The best plan; where memory is short also of those that recompute ops, of each MetaOp the same share,
    ever more of them as long as that gains. None if nothing fits.

    Args:
        whole: without recomputing any.
        bound: its own.

    Raises:
        NoPlanError: the strategy has no plan on these types.
        BelowBoundError: a bug of the planner.
    """
    profile, cluster = whole.profile, whole.cluster
    best = find_mixed(whole, bound, strategy, effort)
    if best is not None and strategy == "spindle" and effort != NO_SEARCH:
        best = on_best_part(whole, bound, best, partial(_on_part, profile, effort))
    for quarters in range(1, 5) if best is None or best.is_short else ():
        counts = {each.name: -(-each.num_ops * quarters // 4) for each in profile.metaops}
        problem = make_mixed_problem(profile, cluster, MemoryFallback(recompute=counts))
        found = find_mixed(problem, mixed_bound(problem), strategy, effort)
        if found is None:
            continue
        if best is not None and best.best.rank() <= found.best.rank():
            break
        note = f"Memory: {sum(counts.values())} ops are recomputed, {quarters}/4 of each MetaOp's."
        best = replace(found, note=note, is_short=True)
        if not found.is_short:
            break
    return best


def _on_part(profile: Profile, effort: int, part: Cluster) -> Found | None:
    """The best plan for some nodes by themselves, of whole batches."""
    own = seen_on(profile, part)
    if not part.is_mixed:
        return find(own, part, "spindle", effort)
    problem = make_mixed_problem(own, part)
    return find_mixed(problem, mixed_bound(problem), "spindle", effort)


def find_mixed(problem: Problem, bound: MixedBound, strategy: StrategyName, effort: int) -> Found | None:
    """The best plan of a problem, its passes in the best order; None if nothing fits.

    Raises:
        NoPlanError: the strategy has no plan on these types.
        BelowBoundError: a bug of the planner.
    """
    judged = _judged(problem, bound, strategy, effort)
    best = _best(judged)
    if best is None:
        return None
    require_above(bound.lower_bound_s, best)
    best = with_passes_apart(problem, best)
    told = best if best.is_apart else apart(problem, best)
    return None if told is None else Found(told, is_short=None in judged)


def _judged(problem: Problem, bound: MixedBound, strategy: StrategyName, effort: int) -> list[Judged | None]:
    if strategy != "spindle":
        return [judge(problem, baseline(problem, strategy))]
    found: list[Judged | None] = []
    for name in BASELINES:
        draft = _draft_of(problem, name)
        if draft is not None:
            found += [judge(problem, draft), judge(problem, Draft("spindle", draft.pieces))]
    for level in range(effort + 1):
        schedules = search(problem, bound, BASE_EFFORT * 4**level, seed=level)
        drafts = [Draft("spindle", to_pieces(problem, timed)) for timed in schedules]
        found += best_of(problem, drafts)
    return found


def _draft_of(problem: Problem, name: StrategyName) -> Draft | None:
    """None where a baseline has no plan here, which is no reason to have none."""
    try:
        return baseline(problem, name)
    except NoPlanError:
        return None


def _best(found: list[Judged | None]) -> Judged | None:
    return min((judged for judged in found if judged is not None), key=Judged.rank, default=None)
