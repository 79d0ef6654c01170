"""A plan says of what it splits over the batch that it was not checked by numbers, and of nothing else."""

from __future__ import annotations

from helpers.plans import metaop_of, profile_of, slice_of
from spindle_cli.plan.assemble import _unchecked
from spindle_cli.profile.numeric_check import NumericCheck, TaskCheck


def test_only_what_is_split_over_the_batch_counts_as_unchecked() -> None:
    whole, split = metaop_of("t/whole", 2, {1: 1.0, 2: 0.6}), metaop_of("t/split", 2, {1: 1.0, 2: 0.6})
    found = TaskCheck(task="t", samples=6, unchecked=dict.fromkeys((whole.name, split.name), "too large"))
    profile = profile_of(whole, split).model_copy(update={"numeric_check": NumericCheck(tasks=(found,))})
    slices = [slice_of(whole, (0, 2), [0], 0.0), slice_of(split, (0, 2), [0, 1], 2.0)]
    assert set(profile.unchecked) >= {whole.name, split.name}
    assert _unchecked(profile, slices) == {
        name: why for name, why in profile.unchecked.items() if name != whole.name
    }
