"""Measurements of another profile, for a workload that is not quite the same: equal ops are not run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spindle_cli.errors import InputError
from spindle_cli.profile.measuring.partial import ResumeFile
from spindle_cli.profile.measuring.settings import MeasureSettings
from spindle_cli.profile.types import Device, Measurements, Profile


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
