"""What a simulated step looks like: who did what when, who waited for whom, and what it held in memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from spindle_cli.account.types import Collective
from spindle_cli.plan.types import Plan


class Activity(StrEnum):
    """What a device, or a link on its behalf, is busy with."""

    FORWARD = "forward"
    BACKWARD = "backward"
    TRANSFER = "transfer"
    SUM = "sum"


class Cause(StrEnum):
    """What a device waits for."""

    ACTIVATION = "activation"  # of another slice, on its way or not computed yet
    GRADIENT = "gradient"  # the same on the way back
    PARTNER = "partner"  # another device that sums inside the same pass
    SUM = "sum"  # a gradient sum, or a small one beside it, before the optimizer step
    LEAVING = "leaving"  # what it has sent, to have left
    GATHER = "gather"  # parameters that others have updated in the step before


@dataclass(frozen=True, slots=True)
class Span:
    """One compute of a device from start to end, or to where it has to wait for parameters.

    `slice_index`: index into `Plan.slices`. `batch`: of the step, from 0.
    """

    device: int
    activity: Activity
    slice_index: int
    start_s: float
    end_s: float
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Passage:
    """A transfer on its link. `producer`, `consumer`: indices into `Plan.slices`, of the forward direction.

    `posted_s`: when both ends had posted it; it then waits for earlier transfers of the pair until `start_s`.
    """

    key: int
    source: int
    destination: int
    producer: int
    consumer: int
    is_gradient: bool
    num_bytes: int
    posted_s: float
    start_s: float
    end_s: float
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Collected:
    """A collective on its links. `joined_s`: when the last of its devices posted it; `group`: as in
    `Together`.
    """

    kind: Collective
    group: int | None
    devices: tuple[int, ...]
    num_bytes: int
    joined_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """A device with nothing to compute until something comes.

    Attributes:
        device: that waits.
        slice_index: of the slice that it is about to run, or runs; None before the optimizer step.
        cause: what comes last.
        source: the device that it comes from; for a sum or gather, the last device to join it.
        source_slice_index: of the slice that it comes from; None for a sum or gather.
        moving_s: of the wait, the part in which what comes was under way: the rest is the source's lateness.
    """

    device: int
    slice_index: int | None
    cause: Cause
    source: int
    source_slice_index: int | None
    start_s: float
    end_s: float
    moving_s: float

    @property
    def length_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """A device updates its parameters, or a part of them, from start to end."""

    device: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class MemoryStep:
    """From `at_s` on a device holds `num_bytes`."""

    at_s: float
    num_bytes: int


@dataclass(frozen=True)
class Simulation:
    """One step of a plan, of `plan.accumulate` batches.

    Attributes:
        step_s: until every device has updated its parameters and everything sent has arrived.
        spans, passages, collected, waits: ordered by start, then device. `steps`: by device, then start.
        memory: of each device, ascending in time; the first entry is what it holds before the step.
    """

    plan: Plan
    step_s: float
    spans: tuple[Span, ...]
    passages: tuple[Passage, ...]
    collected: tuple[Collected, ...]
    waits: tuple[Wait, ...]
    steps: tuple[OptimizerStep, ...]
    memory: tuple[tuple[MemoryStep, ...], ...]

    @property
    def iteration_s(self) -> float:
        """Seconds of one batch, on average over those of the step, as the plan's prediction."""
        return self.step_s / self.plan.accumulate

    @cached_property
    def sums(self) -> tuple[Collected, ...]:
        """The gradient sums."""
        return tuple(done for done in self.collected if done.kind is Collective.SUM)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each device computes, the optimizer's step included."""
        busy = [0.0] * self.plan.cluster.num_devices
        computes: tuple[Span | OptimizerStep, ...] = (*self.spans, *self.steps)
        for work in computes:
            busy[work.device] += work.end_s - work.start_s
        return tuple(busy)

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """Share of the step that each device computes."""
        return tuple(busy / self.step_s if self.step_s else 0.0 for busy in self.busy_s)

    @cached_property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """The most that each device ever holds."""
        return tuple(max(step.num_bytes for step in steps) for steps in self.memory)
