"""Simulate a plan, or an evaluation by it: link its programs, prove them, and run them over its cluster's
links.
"""

from __future__ import annotations

from dataclasses import replace

from spindle_cli.costs.shares import times_of
from spindle_cli.plan.types import Plan
from spindle_cli.program.evaluated import forward_only
from spindle_cli.program.link import link
from spindle_cli.program.proof.proof import prove, prove_forward
from spindle_cli.program.types import StepSettings
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


def has_times(plan: Plan, task: str) -> bool:
    """Whether a plan knows what each of a task's slices takes."""
    slices = [slice_ for slice_ in plan.slices if plan.by_name[slice_.metaop].task == task]
    return bool(slices) and all(
        times_of(plan.by_name[slice_.metaop], slice_, plan.cluster) is not None for slice_ in slices
    )


def evaluation_s(plan: Plan, task: str, num_samples: int) -> float:
    """Seconds in which a task is evaluated on so many samples: of its forward passes and what they hand to
    each other, one batch after another. Reading and gathering take no time in it.

    Raises:
        InputError: the plan lacks a curve point that a slice uses.
        ProgramError: its forward passes alone would not come to their end.
    """
    batch_size = next(metaop.batch_size for metaop in plan.metaops if metaop.task == task)
    whole = link(plan)
    forward = forward_only(whole, task)
    prove_forward(forward, whole, task)
    once = plan.model_copy(update={"accumulate": 1})
    # No parameters are on their way, as they are while a step begins.
    alone = replace(forward, plan=once, settings=StepSettings())
    return Engine(alone).run().step_s * num_samples / batch_size
