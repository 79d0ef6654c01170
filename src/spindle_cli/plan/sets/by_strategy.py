"""The fastest plan for sets of tasks by any strategy.

The plan of each set is the fastest by itself; what all of them hold together, and so the mean of their steps,
is another matter. So where any strategy may be taken, the sets are planned by each, and compared as a whole.
"""

from __future__ import annotations

from collections.abc import Callable

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.types import Plan, StrategyName, strategies_on


def by_best_strategy(strategy: StrategyName, cluster: Cluster, make: Callable[[StrategyName], Plan]) -> Plan:
    """The plan by a strategy; by `spindle` the fastest in the mean of the steps by any, of equals its own.

    Args:
        make: the plan of all sets by one strategy.

    Raises:
        NoPlanError: there is none.
    """
    if strategy != "spindle":
        return make(strategy)
    found: list[Plan] = []
    failed: NoPlanError | None = None
    for name in strategies_on(cluster):
        try:
            found.append(make(name))
        except NoPlanError as error:
            failed = failed or error  # what its own strategy says is told
    if not found:
        assert failed is not None
        raise failed
    best = min(found, key=lambda plan: plan.mean_iteration_s)
    if best.strategy == strategy:
        return best
    note = f"No better plan was found than {best.strategy}'s, so this is it."
    return best.model_copy(update={"strategy": strategy, "notes": (*best.notes, note)})
