"""The best plan on a cluster of several types of device: of whole batches, of micro-batches, or with what
devices share out.
"""

from __future__ import annotations

from functools import partial

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.plan.best.asked import Asked
from spindle_cli.plan.best.find import Found, find, find_in, require_above
from spindle_cli.plan.best.find_asked import or_moving
from spindle_cli.plan.best.in_memory import in_memory
from spindle_cli.plan.best.micro_batches import in_micro_batches
from spindle_cli.plan.best.seeds import Seeds
from spindle_cli.plan.bound.bound import Bound
from spindle_cli.plan.mixed.parts import on_best_part
from spindle_cli.plan.mixed.posed import SeveralTypes
from spindle_cli.plan.search.memory_fallback import (
    OrLessS,
    itself,
)
from spindle_cli.plan.search.passes_apart import apart, with_passes_apart
from spindle_cli.plan.search.posed import NO_SEARCH
from spindle_cli.plan.types import StrategyName
from spindle_cli.plan.weights.on_part import weights_on
from spindle_cli.profile.mixed.seen import seen_on
from spindle_cli.profile.types import Profile


def require_possible(profile: Profile, cluster: Cluster, sharding: ShardingOf | None = None) -> None:
    """Refuse what plans for several types of device do not have. `sharding`: that is asked for.

    Raises:
        NoPlanError: every device updates its own copies.
    """
    types = ", ".join(cluster.types)
    alone = [key for key, level in (sharding or {}).items() if level is Sharding.NONE]
    if not cluster.is_cpu and alone:
        raise NoPlanError(
            f"sharding: none for {alone[0]!r}: {cluster.name!r} has devices of several types ({types}), each "
            "of which would update its own copy: types round differently, and the copies would drift apart",
            hint="Ask for `optimizer`, or more, in the place of `none`.",
        )
    if not cluster.is_cpu and not profile.optimizer_state_sharded:
        raise NoPlanError(
            f"{cluster.name!r} has devices of several types ({types}), each of which would "
            "update its own copy of a parameter: types round differently, and the copies would drift apart",
            hint="Let one device update each: `shard_optimizer: true` under `train`, and profile again.",
        )


def find_on_types(
    profile: Profile, cluster: Cluster, asked: Asked, bound: Bound, or_less_s: OrLessS = itself
) -> Found | None:
    """The best plan that is asked for; where memory is short also of those of micro-batches and of those that
    share out parameters, as memory asks for. None if nothing fits, or what does is not faster than another
    kind of plan.

    Args:
        bound: of whole batches, with nothing given up.

    Raises:
        NoPlanError: the strategy has no plan on these types, or a task cannot be cut or shared out so.
        BelowBoundError: a bug of the planner.
    """
    cluster = asked.allowed(cluster)
    profile = profile.sharded(asked.sharding or {})
    posing = SeveralTypes()
    cut = partial(in_micro_batches, cluster=cluster, make=posing.problem)
    seeds = Seeds(profile, cluster, asked, posing, cut)
    search = partial(
        find_in_memory, cluster=cluster, strategy=asked.strategy, effort=asked.effort, posing=posing
    )
    if asked.micro_batches is not None:
        asked_for = cut(profile, asked.micro_batches)
        quick, _ = posing.posed(asked_for.one, cluster).best(asked.strategy, NO_SEARCH)
        found = find_in(asked_for, search, quick)
    else:
        found = search(profile)
        may_leave = asked.strategy == "spindle" and asked.effort != NO_SEARCH and not asked.shares_out_more
        if found is not None and may_leave:
            problem = posing.problem(profile, cluster)
            found = on_best_part(problem, bound, found, partial(_on_part, profile, asked.effort, cluster))
    return or_moving(seeds.or_better(found, bound.lower_bound_s, or_less_s), profile, cluster)


def find_in_memory(
    profile: Profile,
    cluster: Cluster,
    strategy: StrategyName,
    effort: int,
    posing: SeveralTypes,
) -> Found | None:
    """The best plan, its passes in the best order; where memory is short also of those that recompute ops or
    split layers. None if nothing fits, or what does is not faster than another kind of plan.

    Raises:
        NoPlanError: the strategy has no plan on these types.
        BelowBoundError: a bug of the planner.
    """
    posed = posing.posed(profile, cluster)
    best, all_fit = posed.best(strategy, effort)

    begins = [] if best is None else [best]
    found = in_memory(posed.problem, posed.lower_bound_s, begins, strategy, effort, all_fit=all_fit)
    if found is None:
        return None
    best, problem = found.best, found.problem
    require_above(posed.lower_bound_s, best.prediction.compute_s, best.strategy)
    best = with_passes_apart(problem, best)
    told = best if best.is_apart else apart(problem, best)
    if told is None:
        return None
    return Found(told, not all_fit, found.note, sharding=profile.sharding, is_searched=found.is_searched)


def _on_part(profile: Profile, effort: int, whole: Cluster, part: Cluster) -> Found | None:
    """The best plan for some nodes of a cluster by themselves, of whole batches."""
    own = seen_on(profile, part).weighted(weights_on(part, profile.shard_weights, whole))
    if not part.is_mixed:
        return find(own, part, "spindle", effort)
    return find_in_memory(own, part, "spindle", effort, SeveralTypes())
