"""The clock of a plan."""

from __future__ import annotations

from spindle_cli.account.activations import pass_order, slice_edges, slice_layouts
from spindle_cli.plan.types import Plan
from spindle_cli.program.clock import Clocks, PassClock


def clocks_of(plan: Plan) -> Clocks:
    """What makes the clocks of a plan."""
    edges = slice_edges(plan)
    return Clocks(plan, pass_order(plan, edges), slice_layouts(plan), edges)


def clock_of(plan: Plan) -> PassClock:
    """The clock of a plan, none of whose passes waits for parameters."""
    return clocks_of(plan).clock()
