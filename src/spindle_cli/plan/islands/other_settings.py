"""What islands would take with other `every` and `bits`. Both are part of what is trained, so the workload
file says them, and no planner chooses; the plan of an island is the same with any.
"""

from __future__ import annotations

from typing import get_args

from spindle_cli.account.traffic import outer_step_bytes, outer_step_s
from spindle_cli.files.artifact import Model
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import LocalSgd

# Steps from one outer step to the next that are shown, beside the plan's own.
EVERY = (1, 10, 50, 100, 200, 500, 1000)


class OuterSteps(Model):
    """With an outer step after every `every` steps, mean figures of an iteration. What is saved is below 0
    where it takes longer.

    Attributes:
        every: Steps from one outer step to the next.
        iteration_s: Mean seconds of an iteration.
        bytes_per_iteration: Bytes that the device that sends most sends to all its peer replicas.
        saved_s: Seconds saved against gradients that are summed over all devices in every step; null: nobody
            knows.
        saved_to_every_step_s: Seconds saved against an outer step after every step.
    """

    every: int
    iteration_s: float
    bytes_per_iteration: float
    saved_s: float | None
    saved_to_every_step_s: float


class InBits(Model):
    """What outer steps take with so many bits of each number that is sent.

    Attributes:
        bits: Bits of each number.
        outer_step_s: Seconds of an outer step.
        outer_step_bytes: Bytes that the device that sends most sends in it.
        saves_from: The smallest `every` that takes less time than to sum gradients over all devices in every
            step; null: none does, or nobody knows.
        steps: The figures for several values of `every`.
    """

    bits: int
    outer_step_s: float
    outer_step_bytes: int
    saves_from: int | None
    steps: tuple[OuterSteps, ...]


class OtherSettings(Model):
    """What outer steps take as the plan has them, and with other settings.

    Attributes:
        islands: How many islands there are.
        every: The plan's `every`.
        bits: The plan's `bits`.
        step_iterations: Batches of every task in a step (`train.accumulate`).
        inner_s: Seconds of an iteration without outer steps.
        without_s: Seconds of an iteration with gradients summed over all devices; null: nobody knows.
        of_bits: The figures for each number of bits.
    """

    islands: int
    every: int
    bits: int
    step_iterations: int
    inner_s: float
    without_s: float | None
    of_bits: tuple[InBits, ...]


def other_settings(plan: Plan) -> OtherSettings | None:
    """None without islands, and where these are not the plan's cluster over and over, which `check` tells."""
    if plan.islands is None or plan.local_sgd is None:
        return None
    local_sgd = plan.local_sgd
    if plan.islands.cluster.node_sizes != plan.cluster.node_sizes * local_sgd.islands:
        return None
    every_bits = sorted(get_args(LocalSgd.model_fields["bits"].annotation), reverse=True)
    return OtherSettings(
        islands=local_sgd.islands,
        every=local_sgd.every,
        bits=local_sgd.bits,
        step_iterations=plan.accumulate,
        inner_s=plan.predicted.iteration_s,
        without_s=plan.islands.without_s,
        of_bits=tuple(
            _in_bits(plan, local_sgd.model_copy(update={"bits": bits}), plan.islands.without_s)
            for bits in every_bits
        ),
    )


def _in_bits(plan: Plan, local_sgd: LocalSgd, without_s: float | None) -> InBits:
    sent = max(outer_step_bytes(plan, local_sgd))
    took_s = outer_step_s(plan, local_sgd, plan.whole_cluster)
    inner_s = plan.predicted.iteration_s
    per_step = took_s / plan.accumulate
    steps = tuple(
        OuterSteps(
            every=every,
            iteration_s=inner_s + per_step / every,
            bytes_per_iteration=sent / (every * plan.accumulate),
            saved_s=None if without_s is None else without_s - (inner_s + per_step / every),
            saved_to_every_step_s=per_step - per_step / every,
        )
        for every in sorted({*EVERY, local_sgd.every})
    )
    saves = without_s is not None and inner_s < without_s
    return InBits(
        bits=local_sgd.bits,
        outer_step_s=took_s,
        outer_step_bytes=sent,
        saves_from=int(per_step / (without_s - inner_s)) + 1 if saves and without_s is not None else None,
        steps=steps,
    )
