"""The sets of tasks that steps run, found before a run: one plan is made for each."""

from __future__ import annotations

from math import lcm

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.sampling.turns import KEY, Turns
from spindle_cli.workload.settings.sampling import TaskShare

# Each set takes a plan of its own, which is made, checked and linked.
MOST_SETS = 16
LONGEST_PERIOD = 10_000


def sets_of(turns: Turns) -> tuple[TaskShare, ...]:
    """The sets that occur and the share of the steps of each, the most frequent first; by name where equal.

    What `every` makes comes back after the least common multiple of its periods, so these are all of them. Of
    a draw every task is drawn sooner or later.

    Raises:
        WorkloadError: a step would have no task, the period is too long to go through, or there are too many
            sets.
    """
    period = lcm(*(each.every for each in turns.periods)) if turns.periods else 1
    if period > LONGEST_PERIOD:
        found = ", ".join(str(each.every) for each in turns.periods)
        raise WorkloadError(
            f"{KEY}: `every` of {found} come back to the same tasks after {period} steps only, more than "
            f"{LONGEST_PERIOD}",
            hint="Choose numbers with common factors, such as 2, 4 and 8.",
        )
    shares: dict[tuple[str, ...], float] = {}
    for step in range(period):
        undrawn = turns.undrawn(step)
        drawn = [({name}, share) for name, share in turns.probabilities.items()] or [(set(), 1.0)]
        for names, share in drawn:
            due = turns.in_order(undrawn | names)
            if not due:
                raise WorkloadError(
                    f"{KEY}: no task runs at step {step} (counted from 0), nor every {period} steps after it",
                    hint="Leave a task out of `every`, so that it runs at every step, or give one the offset "
                    "that is missing.",
                )
            shares[due] = shares.get(due, 0.0) + share / period
    if len(shares) > MOST_SETS:
        raise WorkloadError(
            f"{KEY}: the steps run {len(shares)} different sets of tasks, and each takes a plan of its own; "
            f"at most {MOST_SETS} are planned",
            hint="Give tasks the same `every` and `offset`, or draw among fewer.",
        )
    ordered = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
    return tuple(TaskShare(tasks=tasks, share=share) for tasks, share in ordered)


def sampled_sets(turns: Turns) -> tuple[TaskShare, ...]:
    """What `sets_of` gives, or nothing where every step runs all tasks; raises what `sets_of` raises."""
    found = sets_of(turns)
    return () if [each.tasks for each in found] == [turns.names] else found
