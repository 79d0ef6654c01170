"""What plans with activations in host memory are held to."""

from __future__ import annotations

import pytest

from spindle_cli.check.run import check_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile
from spindle_cli.simulate.run import simulate


def moved(plan: Plan) -> tuple[int, int]:
    """How many ops have activations in host memory, and how many are recomputed."""
    return (
        sum(piece.num_offloaded for piece in plan.slices),
        sum(piece.num_recomputed for piece in plan.slices),
    )


def sound(plan: Plan, profile: Profile, *, within: float) -> Plan:
    """A plan that `check` finds nothing in, and that is simulated as it is predicted, to this share."""
    assert check_plan(plan, profile) == ()
    assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=within)
    return plan
