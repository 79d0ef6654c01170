"""What the process that profiles and its workers tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spindle_cli.profile.machine.machine import DeviceType
from spindle_cli.profile.op.jobs import Job, OpRef
from spindle_cli.profile.op.split_runs import SplitSums
from spindle_cli.profile.op.timings import Limits, Sample
from spindle_cli.profile.types import MeasuredLink, ShareMemory
from spindle_cli.workload.settings.types import TaskLengths


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker needs to know to start.

    Attributes:
        source, folder: how to load the workload, and the folder that its path is relative to.
        lengths: of batches whose shapes differ, by task.
        threads: of each worker's operations.
        processes_per_core: how many workers take turns on a core, or on a core's worth of granted time.
        stand_ins: see `JobTable`.
    """

    source: str
    folder: Path
    device: DeviceType
    threads: int
    processes_per_core: float
    stand_ins: Mapping[OpRef, OpRef]
    lengths: Mapping[str, TaskLengths]


@dataclass(frozen=True)
class Prepare:
    """Get the op and its inputs ready, warm up; answered by `Prepared`."""

    job: Job
    limits: Limits


@dataclass(frozen=True)
class Measure:
    """Repeat the prepared op, `runs` times each, until the first worker has enough; gives `Measured`."""

    runs: int
    limits: Limits


@dataclass(frozen=True)
class MeasureLink:
    """Bounce messages with the partner, met through a new file at `store`; answered by `LinkMeasured`."""

    store: Path
    rank: int
    limits: Limits


@dataclass(frozen=True)
class MeasureOptimizer:
    """Step the workload's optimizer, in lockstep with the others; answered by `OptimizerMeasured`."""

    limits: Limits


@dataclass(frozen=True)
class Prepared:
    """The op is warm: seconds of one run, bytes kept from forward to backward, all that it takes of memory.

    `sums`: what a part of a split op would have to sum with the others. `loss_chunks`: in how many its loss
    is computed.
    """

    run_s: float
    activation_bytes: int
    memory: ShareMemory
    sums: SplitSums
    loss_chunks: int = 1


@dataclass(frozen=True)
class Measured:
    """The samples of a measured op, one for each repeat."""

    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class LinkMeasured:
    """The link between the two."""

    link: MeasuredLink


@dataclass(frozen=True)
class OptimizerMeasured:
    """Seconds of the optimizer's step for each byte of parameters that it updates."""

    s_per_byte: float


@dataclass(frozen=True)
class Started:
    """Tells that the workload is loaded."""


@dataclass(frozen=True)
class Failed:
    """The request could not be done.

    `out_of_memory`: the share does not fit; anything else ends the profile. `is_users`: the workload's
    own error.
    """

    message: str
    hint: str | None
    traceback: str | None
    out_of_memory: bool = False
    is_users: bool = False


Request = Prepare | Measure | MeasureLink | MeasureOptimizer
Reply = Started | Prepared | Measured | LinkMeasured | OptimizerMeasured | Failed
