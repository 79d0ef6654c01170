"""Pipelines of micro-batches where sums are slow, whether memory is short or not: all tasks in ever more
micro-batches alike, on lanes of devices (`pipelines/`), as long as that gains.

Their messages share links with sums and with each other, in an order that no delay changes, of which the
prediction knows little: so the simulator is asked as well.
"""

from __future__ import annotations

from collections.abc import Callable

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.find import Found
from spindle_cli.plan.best.micro_batches import MicroBatched, alike_micro_batches, in_micro_batches
from spindle_cli.plan.bound.any_cut import lower_bound_any_s
from spindle_cli.plan.pipelines.drafts import bounded
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.search.judge import Judged, measure_as_they_are, slices_in_order
from spindle_cli.profile.types import Profile

# How many micro-batches all tasks have alike; more hide more of a pipeline's start and end. After so many of
# these in a row that gain nothing, more are not tried.
COUNTS = (4, 8, 16, 32)
PATIENCE = 2
# MetaOps of all micro-batches, beyond which planning takes too long.
MOST_METAOPS = 400
# A try is worth its time where sums take this much of the iteration, or what is computed this many times the
# bound of all cuts.
SUMS_MATTER = 0.1
FAR_FROM_BOUND = 1.5
# By how much an iteration has to be shorter for a plan of more slices.
WORTH = 0.01
# By which part of what messages take a pipeline is taken to last longer than predicted: three of four of
# bert-base and ViT on 4 x 1 and 4 x 8 A800s with 1.25 and 3 GB/s between nodes are simulated to last less
# long. Over gloo the messages of two devices go one after another both ways, and take the processors that
# compute.
UNHIDDEN = {"nccl": 0.15, "gloo": 1.0}


def in_pipelines(
    profile: Profile, cluster: Cluster, found: Found | None, simulated_s: Callable[[Found], float]
) -> Found | None:
    """The best plan; `found` where no pipeline of micro-batches is shorter by `WORTH`, as predicted and as
    simulated.

    Args:
        found: the best of other plans; None: nothing fits.
        simulated_s: a plan's iteration by simulation.
    """
    bound_s = lower_bound_any_s(profile, cluster.num_devices)
    if found is None or not may_gain(found.best.prediction, bound_s):
        return found
    best, best_s = found, found.best.prediction.iteration_s
    least_s: float | None = None  # of the best, by simulation
    known: list[dict[str, int]] = []
    missed = 0
    for count in COUNTS:
        counts = alike_micro_batches(profile, count)
        if not counts or counts in known:
            continue
        known.append(counts)
        known_s = best_s
        try:
            cut = in_micro_batches(profile, counts, cluster)
            tried = _best_of(cut, best_s)
        except NoPlanError:  # shares of so few samples have no allocation here
            continue
        if tried is not None:
            judged, tried_s = tried
            pipeline = Found(judged, found.is_short, cut=cut, sharding=profile.sharding)
            least_s = simulated_s(best) if least_s is None else least_s
            own_s = simulated_s(pipeline)
            if own_s < (1 - WORTH) * least_s:
                best, best_s, least_s = pipeline, tried_s, own_s
        missed = 0 if best_s < known_s else missed + 1
        if missed == PATIENCE:  # the same bytes go between lanes, however many messages they are
            break
    return best


def may_gain(best: Prediction, lower_bound_s: float) -> bool:
    """Whether sums make so much of the best other plan, or it computes so long as it avoids them."""
    sums_show = best.gradient_sum_s >= SUMS_MATTER * best.iteration_s
    return sums_show or best.compute_s >= FAR_FROM_BOUND * lower_bound_s


def _best_of(cut: MicroBatched, best_s: float) -> tuple[Judged, float] | None:
    """The fastest pipeline of these micro-batches that fits, and takes at least `WORTH` less than the best,
    with the seconds that it takes; what of its messages does not hide behind passes (`UNHIDDEN`) is counted,
    which the prediction does not.
    """
    if len(cut.all.nodes) > MOST_METAOPS:
        return None
    enough_s = (1 - WORTH) * best_s
    faster = None
    unhidden = UNHIDDEN[cut.cluster.talks_by]
    for draft, messages_s in bounded(cut.all, 0, enough_s):
        unhidden_s = unhidden * messages_s
        if draft.order is None or unhidden_s >= enough_s:
            continue
        judged = measure_as_they_are(cut.all, draft.name, slices_in_order(cut.all, draft, draft.order))
        if judged is not None and judged.prediction.iteration_s + unhidden_s < enough_s:
            enough_s = judged.prediction.iteration_s + unhidden_s
            faster = judged, enough_s
    return faster
