"""Pipelines of micro-batches where sums are slow, whether memory is short or not: all tasks alike, or those
with most work alone, in ever more micro-batches on lanes of devices (`pipelines/`), as long as that gains;
then each task in fewer or more.

Their messages share links with sums and with each other, in an order that no delay changes, of which the
prediction knows little: so the simulator is asked as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.find import PlanResult
from spindle_cli.plan.best.micro_batches import (
    MicroBatched,
    alike_micro_batches,
    in_micro_batches,
    in_parts,
)
from spindle_cli.plan.pipelines.candidates import bounded
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.problem import WORTH
from spindle_cli.plan.search.evaluate import EvaluatedCandidate, measure_as_they_are, slices_in_order
from spindle_cli.profile.types import MetaOpProfile, Profile

# How many micro-batches tasks have alike; more hide more of a pipeline's start and end. After so many of
# these in a row that gain nothing, more are not tried.
COUNTS = (4, 8, 16, 32)
PATIENCE = 2
# MetaOps of all micro-batches, beyond which planning takes too long.
MOST_METAOPS = 400
# A try is worth its time where sums take this much of the iteration, or what is computed this many times the
# bound of all cuts.
SUMS_MATTER = 0.1
TIMES_ALL_CUTS_BOUND = 1.5
# By which part of what messages take a pipeline is taken to last longer than predicted: three of four of
# bert-base and ViT on 4 x 1 and 4 x 8 A800s with 1.25 and 3 GB/s between nodes are simulated to last less
# long. Over gloo the messages of two devices go one after another both ways, and take the processors that
# compute.
UNHIDDEN = {"nccl": 0.15, "gloo": 1.0}


def in_pipelines(
    profile: Profile,
    cluster: Cluster,
    incumbent: PlanResult | None,
    bound_any_s: float,
    simulated_s: Callable[[PlanResult], float],
    micro_batches: Mapping[str, int] | None = None,
) -> PlanResult | None:
    """The best plan; `incumbent` where no pipeline of micro-batches is shorter by `WORTH`, as predicted and
    as simulated.

    Args:
        incumbent: the best of other plans; None: nothing fits.
        bound_any_s: before which no schedule ends, however batches are cut.
        simulated_s: a plan's iteration by simulation.
        micro_batches: of each task, where they are asked for: the incumbent has so many, and so have
            pipelines.
    """
    if (
        incumbent is None
        or not may_gain(incumbent.best.prediction, bound_any_s)
        or not _has_equal_batches(profile)
    ):
        return incumbent
    search = _Search(profile, cluster, simulated_s, incumbent, incumbent.best.prediction.iteration_s)
    if micro_batches is not None:
        counts = {task: count for task, count in micro_batches.items() if count > 1}
        if counts:
            search.gains(counts)
        return search.best
    _cut_alike(search)
    if search.best is not incumbent:
        search.cut_each_by_itself()
    return search.best


def _cut_alike(search: _Search) -> None:
    """Try ever more micro-batches of all tasks alike, and of those with most work alone, as long as that
    gains.
    """
    heaviest = _tasks_of_parts(search.profile)[0]
    missed = 0
    for count in COUNTS:
        alike = alike_micro_batches(search.profile, count)
        alone = {task: task_count for task, task_count in alike.items() if task in heaviest}
        gained = [search.gains(counts) for counts in (alike, alone) if counts and search.is_new(counts)]
        if gained:
            missed = 0 if any(gained) else missed + 1
        if missed == PATIENCE:  # the same bytes go between lanes, however many messages they are
            break


@dataclass
class _Search:
    """The best plan so far.

    Attributes:
        best_s: what it takes, with what of its messages does not hide.
        least_s: what it takes by simulation; None: it has not been simulated.
        seen: the numbers of micro-batches, by task, that have been tried.
    """

    profile: Profile
    cluster: Cluster
    simulated_s: Callable[[PlanResult], float]
    best: PlanResult
    best_s: float
    least_s: float | None = None
    seen: list[Mapping[str, int]] = field(default_factory=list)

    @property
    def tasks(self) -> set[str]:
        """All of them."""
        return {metaop.task for metaop in self.profile.metaops}

    def is_new(self, counts: Mapping[str, int]) -> bool:
        """Whether these numbers have not been tried."""
        return counts not in self.seen

    def gains(self, counts: Mapping[str, int]) -> bool:
        """Try so many micro-batches, by task; whether the best plan has so many now."""
        self.seen.append(counts)
        try:
            cut = in_micro_batches(self.profile, counts, self.cluster)
            best = _best_of(cut, self.best_s)
        except NoPlanError:  # shares of so few samples have no allocation here
            return False
        if best is None:
            return False
        evaluated, tried_s = best
        pipeline = PlanResult(evaluated, self.best.is_short, cut=cut, sharding=self.profile.sharding)
        if self.least_s is None:
            self.least_s = self.simulated_s(self.best)
        pipeline_s = self.simulated_s(pipeline)
        if pipeline_s >= (1 - WORTH) * self.least_s:
            return False
        self.best, self.best_s, self.least_s = pipeline, tried_s, pipeline_s
        return True

    def cut_each_by_itself(self) -> None:
        """Try half as many micro-batches of each task, and twice as many where that does not gain: a short
        task pays for more of them what a long one gains by. Tasks that exchange values are cut alike.
        """
        parts = _tasks_of_parts(self.profile)
        for tasks in parts if len(parts) > 1 else ():
            for factor in (0.5, 2):
                while self._cuts(tasks, factor):
                    pass

    def _cuts(self, tasks: Collection[str], factor: float) -> bool:
        """Whether the best plan has so many times as many micro-batches of some tasks now."""
        assert self.best.cut is not None, "each task is cut by itself from where all are cut alike"
        now = {task: self.best.cut.counts.get(task, 1) for task in self.tasks}
        wanted = round(factor * max(now[task] for task in tasks))
        possible = alike_micro_batches(self.profile, wanted) if wanted > 1 else {}
        counts = {**now, **{task: possible.get(task, 1) for task in tasks}}
        counts = {task: count for task, count in counts.items() if count > 1}
        return bool(counts) and self.is_new(counts) and self.gains(counts)


def _has_equal_batches(profile: Profile) -> bool:
    """Whether all MetaOps take values of as many samples as they have: no program runs others, so that none
    can be simulated.
    """
    batch_of = {metaop.name: metaop.batch_size for metaop in profile.metaops}
    return all(batch_of[name] == metaop.batch_size for metaop in profile.metaops for name in metaop.inputs)


def _tasks_of_parts(profile: Profile) -> list[tuple[str, ...]]:
    """The tasks that exchange values, those first of which most is computed."""

    def least_work_s(metaops: Sequence[MetaOpProfile]) -> float:
        return sum(
            metaop.num_ops * min(point.num_devices * point.op_s for point in metaop.curve)
            for metaop in metaops
        )

    parts = sorted(in_parts(profile).values(), key=lambda metaops: -least_work_s(metaops))
    return [tuple(dict.fromkeys(metaop.task for metaop in metaops)) for metaops in parts]


def may_gain(best: Prediction, lower_bound_s: float) -> bool:
    """Whether sums make so much of the best other plan, or it computes so long as it avoids them."""
    sums_show = best.gradient_sum_s >= SUMS_MATTER * best.iteration_s
    return sums_show or best.compute_s >= TIMES_ALL_CUTS_BOUND * lower_bound_s


def _best_of(cut: MicroBatched, best_s: float) -> tuple[EvaluatedCandidate, float] | None:
    """The fastest pipeline of these micro-batches that fits, and takes at least `WORTH` less than the best,
    with the seconds that it takes; what of its messages does not hide behind passes (`UNHIDDEN`) is counted,
    which the prediction does not.
    """
    if len(cut.all.nodes) > MOST_METAOPS:
        return None
    enough_s = (1 - WORTH) * best_s
    faster = None
    unhidden = UNHIDDEN[cut.cluster.talks_by]
    for candidate, messages_s in bounded(cut.all, 0, enough_s):
        unhidden_s = unhidden * messages_s
        if candidate.order is None or unhidden_s >= enough_s:
            continue
        evaluated = measure_as_they_are(
            cut.all, candidate.name, slices_in_order(cut.all, candidate, candidate.order)
        )
        if evaluated is not None and evaluated.prediction.iteration_s + unhidden_s < enough_s:
            enough_s = evaluated.prediction.iteration_s + unhidden_s
            faster = evaluated, enough_s
    return faster
