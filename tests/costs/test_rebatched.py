"""Another batch size: what is read of the curve and the shares that are known, of each type of device."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans import metaop_of, profile_of
from helpers.several_types import cluster_of_types, metaop_on_types, on_types, profile_on_types
from spindle_cli.costs.shares import rebatched
from spindle_cli.errors import NoPlanError, UsageError
from spindle_cli.files.cluster import Cluster, NodeGroup
from spindle_cli.plan.cutting.shares import MOST_SAMPLES
from spindle_cli.plan.make import make_plan
from spindle_cli.profile.types import LocalSgd, MetaOpProfile, ShareTime
from spindle_cli.questions.edit import edited, with_batch_size

SAMPLE_S = {"cpu-new": 1e-3, "cpu-old": 3e-3}


@given(batch=st.integers(1, 12), other=st.integers(1, 40), more=st.integers(1, 3))
def test_each_type_takes_its_own_time_for_another_batch(batch: int, other: int, more: int) -> None:
    """So many seconds for each sample, on each type, whatever the batch is."""
    changed = rebatched(metaop_on_types("a/x", 1, SAMPLE_S, batch_size=batch), other, more_devices=more)
    assert {point.device for point in changed.curve} == set(SAMPLE_S)
    for point in changed.curve:
        assert point.op_s == pytest.approx(other / point.dp * SAMPLE_S[point.device or ""])
    for device, seconds in SAMPLE_S.items():
        own = [share for share in changed.shares if share.device == device]
        assert max(share.samples for share in own) >= other  # any share of an unequal cut
        for share in own:
            assert share.forward_s + share.backward_s == pytest.approx(share.samples * seconds)
        assert all(before.samples < after.samples for before, after in pairwise(own))


def test_types_with_equal_curves_are_read_as_one() -> None:
    curve = {n: 1e-3 + 8e-3 / n for n in (1, 2, 4)}
    alone = profile_of(metaop_of("a/x", 2, curve, batch_size=8))
    both = on_types(alone, {"cpu-new": 1.0, "cpu-old": 1.0})
    for other in (3, 6, 8, 16, 24):
        [one], [two] = with_batch_size(alone, "a", other).metaops, with_batch_size(both, "a", other).metaops
        for device in SAMPLE_S:
            own = [point for point in two.curve if point.device == device]
            assert [point.model_copy(update={"device": None}) for point in own] == list(one.curve)


def test_shares_that_the_curve_does_not_have_are_read_too() -> None:
    """A batch of 7 that no number of devices divides: one point, but shares of 1 and 4 tell the offset."""
    shares = [
        ShareTime(samples=n, forward_s=(5 + n) / 3, backward_s=(5 + n) * 2 / 3, source="measured")
        for n in (1, 4, 7)
    ]
    known = metaop_of("a/x", 1, {1: 12.0}, batch_size=7)
    data = known.model_dump() | {"shares": [share.model_dump() for share in shares]}
    changed = rebatched(MetaOpProfile.model_validate(data), 9)
    assert [point.op_s for point in changed.curve] == pytest.approx([14.0])


def test_plans_of_several_types_are_made_for_another_batch() -> None:
    """18 samples by two of 1 ms and two of 3 ms: 7 each and 2 each take 7 ms, more than are known of 6."""
    profile = with_batch_size(profile_on_types(metaop_on_types("a/x", 4, SAMPLE_S, batch_size=6)), "a", 18)
    plan = make_plan(profile, cluster_of_types({"cpu-new": 2, "cpu-old": 2}))
    assert plan.predicted.lower_bound_s == pytest.approx(4 * 7e-3)
    assert plan.predicted.compute_s == pytest.approx(4 * 7e-3)


def test_a_batch_beyond_what_is_planned_is_refused() -> None:
    profile = profile_on_types(metaop_on_types("a/x", 4, SAMPLE_S, batch_size=6))
    with pytest.raises(UsageError, match="--batch a=99999999999999: so large a batch"):
        edited(profile, [], ["a=99999999999999"])
    larger = edited(profile, [], [f"a={MOST_SAMPLES + 1}"])
    with pytest.raises(NoPlanError, match="at most 262,144 are cut over devices of several types"):
        make_plan(larger, cluster_of_types({"cpu-new": 2, "cpu-old": 2}))


def test_islands_of_several_types_say_what_one_model_would_take() -> None:
    metaop = metaop_on_types("a/x", 4, SAMPLE_S, batch_size=6)
    asked = LocalSgd(islands=2, every=4)
    profile = profile_on_types(metaop).model_copy(update={"local_sgd": asked})
    kinds = ("cpu-new", "cpu-old") * 2
    groups = tuple(
        NodeGroup(name=f"n{i}", count=1, devices=1, device=kind, memory_gib=4) for i, kind in enumerate(kinds)
    )
    cluster = Cluster(name="sites", nodes=groups, links=cluster_of_types(dict.fromkeys(kinds, 1)).links)
    islands = make_plan(profile, cluster).islands
    assert islands is not None and islands.without_s is not None
    # 12 samples on 4 devices: at best 12 / (2 / 1 ms + 2 / 3 ms) each of 4 ops
    assert 4 * 12 / (2 / 1e-3 + 2 / 3e-3) <= islands.without_s < 0.030
