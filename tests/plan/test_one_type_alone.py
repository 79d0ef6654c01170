"""Clusters of one type: they are planned as if there were no others."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of
from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan import mixed
from spindle_cli.plan.make import make_plan
from spindle_cli.profile.types import Profile
from spindle_cli.units import GIB

ROOM = Path(mixed.__file__).parent
# Which tells whether there are several types.
ASKED_FIRST = str(ROOM / "alike.py")


def called_for(profile: Profile, cluster: Cluster) -> set[str]:
    """The functions of what plans for several types that making a plan calls."""
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(ROOM)) and file != ASKED_FIRST:
            called.add(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        make_plan(profile, cluster)
    finally:
        sys.setprofile(before)
    return called


def tasks(activation_bytes: int) -> Profile:
    """Two tasks, whose activations may take more than there is."""
    curve = {1: 4.0, 2: 2.0, 4: 1.0}
    return profile_of(
        *(metaop_of(f"t{task}/net", 4, curve, activation_bytes_per_op=activation_bytes) for task in range(2))
    )


@pytest.mark.parametrize("activation_bytes", [2**20, 40 * GIB])
def test_nothing_that_plans_for_several_types_has_a_say(activation_bytes: int) -> None:
    assert called_for(tasks(activation_bytes), cluster_of(4, memory_gib=64.0)) == set()


def test_what_plans_for_several_types_is_seen_to_be_called() -> None:
    profile = profile_on_types(metaop_on_types("t/net", 2, {"fast": 1.0, "slow": 2.0}, batch_size=6))
    called = called_for(profile, cluster_of_types({"fast": 1, "slow": 1}))
    assert {"search", "best"} <= called
