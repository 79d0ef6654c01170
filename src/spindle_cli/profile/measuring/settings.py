"""How a workload is measured, and which measurements of another profile hold for it: equal ops are not run
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import sha256_of
from spindle_cli.files.cluster import Cluster
from spindle_cli.process.devices import cores_of_time, cpu_model
from spindle_cli.profile.machine.machine import DeviceType, own_cores
from spindle_cli.profile.measuring.partial import ResumeFile
from spindle_cli.profile.op.timings import GRANTED_TIME_BLOCK_S, SHARED_CORES_BLOCK_S, Limits
from spindle_cli.profile.types import Device, Measurements, Profile, RuntimeOverhead, Source
from spindle_cli.workload.file import LossChunks
from spindle_cli.workload.file import Precision as TrainPrecision


@dataclass(frozen=True)
class Reused:
    """A profile to take measurements from."""

    path: Path
    profile: Profile
    measurements: Measurements

    @classmethod
    def read(cls, path: Path) -> Reused:
        """Raises InputError: it is no profile, or keeps no measurements."""
        profile = Profile.read(path)
        if profile.measurements is None:
            raise InputError(
                f"--reuse {path}: the profile keeps no measurements to take over: it was estimated, or is of "
                "an earlier version",
                hint="Leave --reuse out.",
            )
        return cls(path, profile, profile.measurements)

    def require_same(self, settings: MeasureSettings, device: Device) -> None:
        """Refuse times of another machine, or measured in another way.

        Raises:
            InputError: naming what differs.
        """
        before: dict[str, Any] = {
            "device": self.profile.device.model_dump(),
            "loss_chunks": 1,
            **self.profile.environment,
            "nproc": self.measurements.nproc,
            "the links of --cluster": self.measurements.links,
        }
        # The device last: a CPU's memory is shared out to the processes, whose number is what differs then.
        now = {
            "compile": None,
            **settings.environment(),
            "device": device.model_dump(),
            "nproc": settings.nproc,
            "the links of --cluster": settings.links,
        }
        for key in now:
            if before.get(key) != now[key]:
                why = "Processes that share a machine slow each other down. " if key == "processes" else ""
                raise InputError(
                    f"--reuse {self.path}: measured with {key} = {before.get(key)!r}, now it is {now[key]!r}",
                    hint=f"{why}Profile in the same way, or leave --reuse out.",
                )

    def hand_over(self, kept: ResumeFile, keys: Sequence[str]) -> str:
        """Put what it has of the jobs with these keys to the results so far; says how much, for people."""
        measurements = self.measurements
        count = sum(key in measurements.timings or key in measurements.failed for key in keys)
        kept.take(
            {key: measurements.timings[key] for key in keys if key in measurements.timings},
            {key for key in keys if key in measurements.failed},
            self.profile.links or None,
        )
        return f"{count} of {len(keys)} measurements are those of {self.path}"


# Measures what the runtime takes of each processor, given how many processes are at it, and threads of each.
MeasuresOverhead = Callable[[int, int], RuntimeOverhead]


@dataclass(frozen=True)
class MeasureSettings:
    """How ops are measured.

    Attributes:
        device: kind of device. `called`: what cluster files call it, of CPUs, if not 'cpu'.
        processes: of this node that are busy at once, one per device.
        nproc: allocations of up to so many devices are measured as such, on as many processes; larger ones
            are composed from one device's share.
        threads: of each process.
        max_devices: curves reach so far.
        max_points: at most about so many points of a curve are measured; those between are fitted.
        limits: when a measurement may stop.
        precision: of the arithmetic, and `compile`: by what layers are compiled, as the train settings have
            them.
        degrees: of tensor parallelism, on the links of `cluster`.
        accepts_noise: times of a busy machine are taken as they are.
        planned_for: whose links the sums of batch norms use; None: the link that is measured.
        overhead: measures the runtime, where processors that compute run it, too: given from outside, as
            profiling knows no runtime. None: it is taken to cost nothing.
    """

    device: DeviceType
    processes: int
    nproc: int
    threads: int
    max_devices: int
    max_points: int
    limits: Limits
    precision: TrainPrecision = "full"
    compile: str | None = None
    float32_matmul: str | None = None
    loss_chunks: LossChunks = "auto"
    degrees: tuple[int, ...] = ()
    cluster: Cluster | None = None
    accepts_noise: bool = False
    planned_for: Cluster | None = None
    called: str | None = None
    overhead: MeasuresOverhead | None = None

    def environment(self) -> dict[str, Any]:
        """Return what the times depend on besides the workload, for the profile."""
        environment: dict[str, Any] = {
            "torch": torch.__version__,
            "threads_per_process": self.threads,
            "processes": self.processes,
            "cores": cores_of_time(),
            "cpu": cpu_model(),
            "precision": "float32" if self.precision == "full" else self.precision,
            "time_limit_s": self.limits.max_s,
            "spread_bound": self.limits.spread,
            "loss_chunks": self.loss_chunks,
        }
        if self.compile is not None:
            environment["compile"] = self.compile
        if self.float32_matmul is not None:
            environment["float32_matmul"] = self.float32_matmul
        if self.device == "cuda":
            environment["cuda"] = torch.version.cuda
        return environment

    @property
    def links(self) -> str | None:
        """Hash of the links of `cluster`."""
        return None if self.cluster is None else sha256_of(self.cluster.links.model_dump())

    def source_of(self, num_devices: int, tp: int) -> Source:
        """What a point says about itself; one device's part of a split op is timed, its sums are not."""
        return "measured" if num_devices <= self.nproc and tp == 1 else "composed"


def shared_limits(limits: Limits, device: DeviceType, processes: int, threads: int) -> Limits:
    """Limits whose repeats are long enough where processes share cores, or the time that they are granted,
    and only wall time says how long.
    """
    if device != "cpu" or threads == 1 or processes * threads <= cores_of_time():
        return limits
    is_granted = cores_of_time() < len(own_cores())
    return replace(limits, block_s=GRANTED_TIME_BLOCK_S if is_granted else SHARED_CORES_BLOCK_S)
