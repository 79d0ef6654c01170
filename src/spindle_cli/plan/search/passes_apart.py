"""Plans whose forward and backward passes are jobs of their own: other orders of the passes of placed slices,
where they make the iteration shorter, or fit the devices' memory where all forward and then all backward does
not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from spindle_cli.account.types import Pass
from spindle_cli.plan.ordering.orders import as_they_come, in_groups, mirrored
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, fastest

# What saves less of the iteration than this is not worth telling passes apart.
WORTH_REORDERING = 0.002


def with_passes_apart(problem: Problem, evaluated: EvaluatedCandidate) -> EvaluatedCandidate:
    """Return the plan with the best order of its passes, or as it was where none gains enough."""
    orders = [
        *(as_they_come(problem, evaluated.slices, longest_first=longest) for longest in (True, False)),
        *in_groups(problem, evaluated.slices),
    ]
    enough_s = (1 - WORTH_REORDERING) * evaluated.prediction.iteration_s
    best = _best(problem, evaluated, orders, enough_s)
    return best if best is not None and best.prediction.iteration_s < enough_s else evaluated


def or_another_apart(
    problem: Problem, best: EvaluatedCandidate, alternatives: Iterable[EvaluatedCandidate | None]
) -> EvaluatedCandidate:
    """A plan in its best order, or another of the same problem if that is faster in its own best order.

    What a device computes it computes in any order: what takes longer by that alone is left out.
    """
    for alternative in alternatives:
        if alternative is not None and _busiest_s(alternative) < best.prediction.iteration_s:
            best = min(best, with_passes_apart(problem, alternative), key=EvaluatedCandidate.rank)
    return best


def _busiest_s(evaluated: EvaluatedCandidate) -> float:
    """Seconds that the device computes that computes longest."""
    busy_s: dict[int, float] = {}
    for slice_ in evaluated.slices:
        length_s = sum(end_s - start_s for start_s, end_s in slice_.times_s)
        for device in slice_.devices:
            busy_s[device] = busy_s.get(device, 0.0) + length_s
    return max(busy_s.values())


def apart(problem: Problem, evaluated: EvaluatedCandidate) -> EvaluatedCandidate | None:
    """A plan whose passes have no times of their own with such times, in the order that it has: all forward,
    then all backward in reverse.
    """
    return _best(problem, evaluated, [mirrored(range(len(evaluated.slices)))])


def told_apart(problem: Problem, evaluated: EvaluatedCandidate) -> EvaluatedCandidate | None:
    """A plan with the times of each pass, as one with `rows` or what is shared out has to say them; None if
    that does not fit.
    """
    needs_times = bool(problem.profile.sharding) or any(
        slice_.rows is not None for slice_ in evaluated.slices
    )
    return evaluated if evaluated.is_apart or not needs_times else apart(problem, evaluated)


def _best(
    problem: Problem, evaluated: EvaluatedCandidate, orders: Iterable[Sequence[Pass]], within_s: float = inf
) -> EvaluatedCandidate | None:
    candidates = (timed(problem, evaluated.slices, order) for order in dict.fromkeys(map(tuple, orders)))
    return fastest(problem, evaluated.strategy, candidates, evaluated.after, within_s)
