"""What a profile says of the runs that its times were corrected by."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spindle_cli.files.artifact import Model

_Seconds = Annotated[float, Field(ge=0, le=1e12)]
_Count = Annotated[int, Field(ge=1)]


class CalibratedRun(Model):
    """A run that a profile was calibrated by, and how far off its plan was.

    Attributes:
        name: of its folder. `sha256`: of its predicted.json.
        plan_sha256: of the plan that it ran, on `num_devices` devices of `num_nodes` nodes.
        steps: that its times are medians of.
        predicted_s, measured_s: of an iteration, by its plan and as it took.
        metaop_error: of the MetaOps' seconds, as measured over as the profile had them before, the median
            distance from 1. `worst_metaop_error`: the largest.
    """

    name: str
    sha256: str
    plan_sha256: str
    num_devices: _Count
    num_nodes: _Count
    steps: _Count
    predicted_s: _Seconds
    measured_s: _Seconds
    metaop_error: Annotated[float, Field(ge=0)] = 0.0
    worst_metaop_error: Annotated[float, Field(ge=0)] = 0.0

    @property
    def error(self) -> float | None:
        """(measured - predicted) / predicted of the iteration; None where nothing was predicted."""
        return None if self.predicted_s == 0 else self.measured_s / self.predicted_s - 1


class Calibration(Model):
    """The runs that the times of a profile were taken from, the latest last.

    Attributes:
        held_up: share by which the iterations of the latest runs were longer than all that the profile
            accounts for: devices that were held up in single steps, time between slices, data.
        links: how many times as long as before messages and sums take, by kind of link, where that was
            measured; of the latest calibration.
    """

    runs: Annotated[tuple[CalibratedRun, ...], Field(min_length=1)]
    held_up: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    links: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
