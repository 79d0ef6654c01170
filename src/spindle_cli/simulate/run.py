"""Simulate a plan: link its programs, prove them, and run them over its cluster's links."""

from __future__ import annotations

from spindle_cli.plan.types import Plan
from spindle_cli.program.link import link
from spindle_cli.program.proof.proof import prove
from spindle_cli.simulate.engine import Engine
from spindle_cli.simulate.types import Simulation


def simulate(plan: Plan) -> Simulation:
    """One iteration of a plan that passes `check`, without devices.

    Compute takes what the plan's curve points say; transfers and sums what costs/links.py says, slower where
    they share a link; the optimizer's step what the profile says for the bytes that a device updates.

    Raises:
        InputError: the plan lacks a curve point that a slice uses.
        ProgramError: its programs would not come to their end.
    """
    program = link(plan)
    prove(program)
    return Engine(program).run()
