"""Pipelines of micro-batches where sums are slow, whether memory is short or not: all tasks in ever more
micro-batches alike, on lanes of devices (`pipelines/`), as long as that gains.
"""

from __future__ import annotations

from spindle_cli.errors import NoPlanError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.best.find import Found
from spindle_cli.plan.best.micro_batches import MicroBatched, alike_micro_batches, in_micro_batches
from spindle_cli.plan.bound.any_cut import lower_bound_any_s
from spindle_cli.plan.pipelines.drafts import bounded
from spindle_cli.plan.placing.predict import Prediction
from spindle_cli.plan.search.judge import Judged, measure_as_they_are, slices_in_order
from spindle_cli.profile.types import Profile

# How many micro-batches all tasks have alike; more hide more of a pipeline's start and end.
COUNTS = (4, 8, 16, 32)
# MetaOps of all micro-batches, beyond which planning takes too long.
MOST_METAOPS = 400
# A try is worth its time where sums take this much of the iteration, or what is computed this many times the
# bound of all cuts.
SUMS_MATTER = 0.1
FAR_FROM_BOUND = 1.5
# By how much an iteration has to be shorter for a plan of more slices.
WORTH = 0.01


def in_pipelines(profile: Profile, cluster: Cluster, found: Found | None) -> Found | None:
    """The best plan; `found` where no pipeline of micro-batches is shorter by `WORTH`.

    Args:
        found: the best of other plans; None: nothing fits.
    """
    bound_s = lower_bound_any_s(profile, cluster.num_devices)
    if found is None or not may_gain(found.best.prediction, bound_s):
        return found
    best = found
    known: list[dict[str, int]] = []
    for count in COUNTS:
        counts = alike_micro_batches(profile, count)
        if not counts or counts in known:
            continue
        known.append(counts)
        try:
            cut = in_micro_batches(profile, counts, cluster)
            tried = _best_of(cut, best.best)
        except NoPlanError:  # shares of so few samples have no allocation here
            continue
        if tried is None:  # the same bytes go between lanes, however many messages they are
            break
        best = Found(tried, found.is_short, cut=cut, sharding=profile.sharding)
    return best


def may_gain(best: Prediction, lower_bound_s: float) -> bool:
    """Whether sums make so much of the best other plan, or it computes so long as it avoids them."""
    sums_show = best.gradient_sum_s >= SUMS_MATTER * best.iteration_s
    return sums_show or best.compute_s >= FAR_FROM_BOUND * lower_bound_s


def _best_of(cut: MicroBatched, best: Judged) -> Judged | None:
    """The fastest pipeline of these micro-batches that fits, and would take at least `WORTH` less than the
    best even if its messages hid behind nothing.

    A message of one micro-batch may wait for those of others that its devices have posted before, which the
    prediction does not count: where messages are long, a pipeline takes longer than predicted.
    """
    if len(cut.all.nodes) > MOST_METAOPS:
        return None
    enough_s = (1 - WORTH) * best.prediction.iteration_s
    faster = None
    for draft, messages_s in bounded(cut.all, 0, enough_s):
        if draft.order is None or messages_s >= enough_s:
            continue
        judged = measure_as_they_are(cut.all, draft.name, slices_in_order(cut.all, draft, draft.order))
        if judged is not None and judged.prediction.iteration_s + messages_s < enough_s:
            faster, enough_s = judged, judged.prediction.iteration_s + messages_s
    return faster
