"""Placing a candidate and evaluating it: by the predicted iteration, inside every device's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from typing import TypeAlias

from spindle_cli.account.device_memory import (
    DeviceMemory,
    host_memory,
    memory_within,
    optimizer_steps_s,
)
from spindle_cli.account.traffic import communicator_bytes, traffic_of
from spindle_cli.account.types import Pass
from spindle_cli.plan.assemble import exact_slices
from spindle_cli.plan.ordering.orders import in_groups
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.placing.arrange import arrange
from spindle_cli.plan.placing.placement import BALANCED, WEIGHTS, DoesNotFitError, PlacementWeights, place
from spindle_cli.plan.placing.predict import Prediction, predict
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import Candidate, Placed, placed_slices
from spindle_cli.plan.types import Slice

# Exchanges tried for each device (arrange.py), counting no more than some of them, and how many of the
# candidates of one search are worth more care.
QUICK_EXCHANGES = 6
CAREFUL_EXCHANGES = 30
MOST_DEVICES_COUNTED = 256
PLACED_WITH_CARE = 2
# What takes this much longer than the best known by its quick placement is not: care brings less.
CARE_BRINGS = 0.01
# By so much of the iteration care in placing may bring more on several types than on one.
CARE_BRINGS_ON_TYPES = 0.02


@dataclass(frozen=True)
class EvaluatedCandidate:
    """A candidate's slices with devices and exact times, the memory that they need, and how long they will
    take.

    `strategy`: the candidate's name. `after`: for each slice, how many of those before it must have ended, as
    in the candidate. `sums_by_node`: False where sums and gathers by nodes were worth it, but for the memory
    that their communicators take.
    """

    strategy: str
    slices: tuple[Slice, ...]
    memory: tuple[DeviceMemory, ...]
    prediction: Prediction
    after: tuple[int, ...] | None = None
    sums_by_node: bool = True

    @property
    def is_apart(self) -> bool:
        """Whether forward and backward passes have an order of their own."""
        return any(slice_.backward_s is not None for slice_ in self.slices)

    def rank(self) -> tuple[float, float, int]:
        """Less is better: the iteration, then the schedule, then the number of slices."""
        return self.prediction.iteration_s, self.prediction.compute_s, len(self.slices)


def evaluate(problem: Problem, candidate: Candidate) -> EvaluatedCandidate | None:
    """A candidate on the devices that it says itself, or where these have no room, or it says none, on
    others; None if it does not fit their memory.
    """
    evaluated: EvaluatedCandidate | None
    if candidate.order is not None:
        return measure(problem, candidate.name, slices_in_order(problem, candidate, candidate.order))
    if candidate.devices is None:
        evaluated = best_placed(problem, candidate, WEIGHTS[:1], QUICK_EXCHANGES)
    else:
        evaluated = evaluate_as_placed(problem, candidate)
    return evaluated or best_placed(problem, candidate, (BALANCED,), 0)


def evaluate_as_placed(problem: Problem, candidate: Candidate) -> EvaluatedCandidate | None:
    """A candidate on the devices that it says; None if it does not fit their memory."""
    assert candidate.devices is not None, "the candidate says its devices"
    slices = exact_slices(problem, Placed(candidate, candidate.devices))
    return measure(problem, candidate.name, slices, candidate.after)


def slices_in_order(problem: Problem, candidate: Candidate, order: Sequence[Pass]) -> tuple[Slice, ...]:
    """The slices of a candidate that says its devices, its passes in an order of all of them."""
    assert candidate.devices is not None, "a candidate that orders passes says its devices"
    slices = exact_slices(problem, Placed(candidate, candidate.devices))
    index_of = {(slice_.metaop, slice_.ops): index for index, slice_ in enumerate(slices)}
    indices = [
        index_of[problem.nodes[slice_.node].metaop.name, (slice_.first, slice_.last)]
        for slice_ in candidate.pieces
    ]
    return timed(problem, slices, [Pass(indices[index], is_backward) for index, is_backward in order])


# The best placement of a candidate by some choices, with so many exchanges for each device (`best_placed`).
PlacedCandidate: TypeAlias = Callable[[Candidate, Sequence[PlacementWeights], int], EvaluatedCandidate | None]


def best_of(
    problem: Problem,
    candidates: Sequence[Candidate],
    placed: PlacedCandidate | None = None,
    *,
    with_care: bool = True,
    within_s: float = inf,
    care_brings: float = CARE_BRINGS,
) -> list[EvaluatedCandidate | None]:
    """The best placements of some candidates that leave the devices to the placement; None for one that does
    not fit.

    All get a quick placement, but what cannot be the best: schedules longer than `within_s`, or than the
    iteration of another. Those that look best, and nearly as good as `within_s`, are then placed with more
    care if that is wanted.

    Args:
        placed: `best_placed` of the problem, with what it has placed before.
        within_s: the iteration of the best plan known.
    """
    placed = placed or cache(partial(best_placed, problem))  # some guides lead to the same candidate
    quick: list[tuple[EvaluatedCandidate | None, Candidate]] = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.end_s):
        if candidate.end_s > within_s:
            break
        evaluated = placed(candidate, WEIGHTS[:1], QUICK_EXCHANGES)
        quick.append((evaluated, candidate))
        if evaluated is not None:
            within_s = min(within_s, evaluated.prediction.iteration_s)
    tried = [candidate for _, candidate in quick]
    quick.sort(key=lambda item: (item[0] is None, item[0].rank() if item[0] else (0.0, 0.0, 0)))
    best = [evaluated for evaluated, _ in quick]
    if with_care:
        best[:PLACED_WITH_CARE] = _placed_carefully(
            placed, quick[:PLACED_WITH_CARE], (1 + care_brings) * within_s
        )
    return best if any(best) else [placed(candidate, (BALANCED,), 0) for candidate in tried]


def _placed_carefully(
    placed: PlacedCandidate,
    quick: Sequence[tuple[EvaluatedCandidate | None, Candidate]],
    within_s: float,
) -> list[EvaluatedCandidate | None]:
    """The better of the quick placement and a careful one of each of some candidates, the best first. From
    the first one on whose quick placement takes longer than `within_s`, they keep that.
    """
    best = [evaluated for evaluated, _ in quick]
    for number, (evaluated, candidate) in enumerate(quick):
        if evaluated is not None and evaluated.prediction.iteration_s > within_s:
            break
        careful = placed(candidate, WEIGHTS[1:], CAREFUL_EXCHANGES)
        if careful is not None and (evaluated is None or careful.rank() < evaluated.rank()):
            best[number] = careful
    return best


def best_placed(
    problem: Problem, candidate: Candidate, choices: Sequence[PlacementWeights], exchanges_per_device: int
) -> EvaluatedCandidate | None:
    """The best placement of a candidate by some choices, each arranged; None if none fits the devices'
    memory.
    """
    placements: list[EvaluatedCandidate] = []
    tried: set[tuple[tuple[int, ...], ...]] = set()
    for weights in choices:
        placed = _place(problem, candidate, weights)
        if placed is None:
            continue
        if placed.devices in tried:
            continue
        tried.add(placed.devices)
        slices = exact_slices(problem, placed)
        memory = _memory_within(problem, slices)
        # Exchanges renumber devices of a type, and change nothing of what each holds.
        if memory is None and not _fits_in_groups(problem, slices):
            continue
        if exchanges_per_device:
            num_exchanges = exchanges_per_device * min(problem.num_devices, MOST_DEVICES_COUNTED)
            slices, goes_to = arrange(problem, slices, num_exchanges)
            memory = None if memory is None else _renumbered(memory, goes_to, problem.cluster.reserve_bytes)
        evaluated = (
            None if memory is None else _measured(problem, candidate.name, slices, memory, candidate.after)
        )
        evaluated = evaluated or _in_best_groups(problem, candidate.name, slices, candidate.after)
        if evaluated is not None:
            placements.append(evaluated)
    return min(placements, key=EvaluatedCandidate.rank, default=None)


def _place(problem: Problem, candidate: Candidate, weights: PlacementWeights) -> Placed | None:
    """With room for everything at once, or where there is none for one part of the MetaGraph at a time."""
    for one_part_at_once in (False, True):
        try:
            return place(problem, candidate, weights, one_part_at_once=one_part_at_once)
        except DoesNotFitError:
            continue
    return None


def measure(
    problem: Problem, strategy: str, slices: tuple[Slice, ...], after: tuple[int, ...] | None = None
) -> EvaluatedCandidate | None:
    """Memory and prediction of a strategy's placed slices; None if a device's memory is too small.

    Where all forward and then all backward does not fit, tasks are run in groups, each forward and then
    backward, as large as they fit.

    Args:
        after: what the candidate says of which slices wait for which.
    """
    evaluated = measure_as_they_are(problem, strategy, slices, after)
    return evaluated or _in_best_groups(problem, strategy, slices, after)


def _in_best_groups(
    problem: Problem, strategy: str, slices: tuple[Slice, ...], after: tuple[int, ...] | None
) -> EvaluatedCandidate | None:
    """The best of groups of tasks that are run one after the other; None if none fits."""
    best: EvaluatedCandidate | None = None
    for ordered in _in_groups(problem, slices):
        larger = measure_as_they_are(problem, strategy, ordered, after)
        if larger is None:
            break  # a larger group holds more
        if best is None or larger.rank() < best.rank():
            best = larger
    return best


def _in_groups(problem: Problem, slices: tuple[Slice, ...]) -> Iterator[tuple[Slice, ...]]:
    """Time slices in groups of ever more tasks."""
    for order in in_groups(problem, slices):
        yield timed(problem, slices, order)


def _fits_in_groups(problem: Problem, slices: tuple[Slice, ...]) -> bool:
    """Whether devices have room, but for communicators, in the order that asks for least."""
    ordered = next(_in_groups(problem, slices), None)
    return ordered is not None and _memory_within(problem, ordered) is not None


def measure_as_they_are(
    problem: Problem, strategy: str, slices: tuple[Slice, ...], after: tuple[int, ...] | None = None
) -> EvaluatedCandidate | None:
    """Evaluate slices in the order of passes that they have; None if they do not fit."""
    memory = _memory_within(problem, slices)
    return None if memory is None else _measured(problem, strategy, slices, memory, after)


def _memory_within(problem: Problem, slices: tuple[Slice, ...]) -> tuple[DeviceMemory, ...] | None:
    """What devices hold, without communicators; None if one has no room."""
    profile, cluster = problem.profile, problem.cluster
    return memory_within(profile.metaops, slices, cluster, profile, cluster.fill_bytes, problem.known_uses)


def _renumbered(
    memory: Sequence[DeviceMemory], goes_to: Sequence[int], reserves: Sequence[int]
) -> tuple[DeviceMemory, ...]:
    """What each device holds that has taken another one's place; its reserve is that of the place."""
    needs = list(memory)
    for need, device in zip(memory, goes_to, strict=True):
        reserve = reserves[device]
        needs[device] = need if need.outside_bytes == reserve else replace(need, outside_bytes=reserve)
    return tuple(needs)


def _measured(
    problem: Problem,
    strategy: str,
    slices: tuple[Slice, ...],
    memory: tuple[DeviceMemory, ...],
    after: tuple[int, ...] | None,
) -> EvaluatedCandidate | None:
    """`memory`: of devices, without communicators. What goes by nodes takes more of them: where these have
    no room, all goes over all devices at once.
    """
    places = frozenset(
        (slice_.metaop, slice_.ops, slice_.micro_batch, slice_.devices, slice_.tp, slice_.rows)
        for slice_ in slices
    )
    least = problem.least_communicators.get(places)
    if least is not None and not has_room(problem, _with_communicators(memory, least)):
        return None
    placed = placed_slices(problem, slices)
    traffic = traffic_of(placed, problem.uses)
    communicators = communicator_bytes(placed, traffic)
    goes_by_nodes = any(group.nodes for group in traffic.groups)
    if goes_by_nodes and not has_room(problem, _with_communicators(memory, communicators)):
        placed = replace(placed, sums_by_node=False)
        traffic = traffic_of(placed, problem.uses)
        communicators = communicator_bytes(placed, traffic)
    whole = _with_communicators(memory, communicators)
    if not has_room(problem, whole):
        # The same in every order of passes, where nothing goes by nodes.
        problem.least_communicators[places] = communicators
        return None
    steps_s = optimizer_steps_s(whole, problem.profile.optimizer_s_per_byte)
    prediction = predict(problem, slices, traffic, max(slice_.last_s for slice_ in slices), steps_s)
    return EvaluatedCandidate(strategy, slices, whole, prediction, after, placed.sums_by_node)


def _with_communicators(
    memory: Sequence[DeviceMemory], communicators: Sequence[int]
) -> tuple[DeviceMemory, ...]:
    """What devices hold that take so many bytes for communicators besides."""
    return tuple(
        need.with_communicators(num_bytes) for need, num_bytes in zip(memory, communicators, strict=True)
    )


def fastest(
    problem: Problem,
    strategy: str,
    candidates: Iterable[tuple[Slice, ...]],
    after: tuple[int, ...] | None = None,
    within_s: float = inf,
) -> EvaluatedCandidate | None:
    """The best of some orders of passes, of equals the first; None if none fits and takes at most `within_s`.

    An iteration takes at least as long as its schedule, so what cannot be the best any more is not measured.
    """
    in_order = [(max(slice_.last_s for slice_ in slices), slices) for slices in candidates]
    best: tuple[tuple[float, float, int], int, EvaluatedCandidate] | None = None
    for number, (end_s, slices) in sorted(enumerate(in_order), key=lambda item: item[1][0]):
        if end_s > within_s:
            break
        evaluated = measure_as_they_are(problem, strategy, slices, after)
        if evaluated is None or (best is not None and best[:2] <= (evaluated.rank(), number)):
            continue
        best = evaluated.rank(), number, evaluated
        within_s = min(within_s, evaluated.prediction.iteration_s)
    return None if best is None else best[2]


def has_room(problem: Problem, memory: Sequence[DeviceMemory]) -> bool:
    """Whether devices, and their nodes for what is moved there, have as much memory as is needed."""
    capacities = problem.cluster.fill_bytes
    fits = all(need.total_bytes <= capacity for need, capacity in zip(memory, capacities, strict=True))
    limits = problem.cluster.host_memory_bytes
    nodes = zip(host_memory(memory, problem.cluster), limits, strict=True)
    return fits and all(limit is None or need <= limit for need, limit in nodes)
