"""timeline.json: what every device of a run did in its last steps, moment by moment, on one clock.

Rank 0 of the runtime writes it; `launch --trace` and `report` read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, Sparse
from spindle_cli.files.parsing import shown

TIMELINE_FILE = "timeline.json"

WaitCause = Literal["activation", "gradient", "leaving", "sum", "losses", "norm", "islands"]


class MeasuredSpan(Sparse):
    """Something that a device did from `start_s` to `end_s`.

    Attributes:
        kind: Forward and backward compute `slice`. A transfer takes an activation from `source_slice` to
            `slice`, or a gradient back the same way; it lasts from when this device, its sender, posts it to
            when the taker has it and uses it. A sum is of a parameter group's gradients, a gather of its new
            values. Data: waiting for the input pipeline.
        start_s: When it began.
        end_s: When it ended.
        slice: Of a wait, the slice that waits; None: the step.
        source_slice: Where a transfer comes from.
        is_gradient: Whether a transfer is on the way back.
        cause: Of a wait, what is waited for; before a slice or one of its ops runs forward that may also be
            new values of its parameters. `leaving`: what the device has sent, and gives up.
        peer: Of a transfer, the device that takes it.
        group: Of a sum or gather, which of the parameter groups of all programs.
        num_bytes: Of transfers, sums and gathers; of transfers as the plan predicts them.
    """

    kind: Literal["forward", "backward", "wait", "data", "optimizer", "transfer", "sum", "gather"]
    start_s: float
    end_s: float
    slice: int | None = None
    source_slice: int | None = None
    is_gradient: bool = False
    cause: WaitCause | None = None
    peer: int | None = None
    group: int | None = None
    num_bytes: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        needed = {
            "forward": {"slice"},
            "backward": {"slice"},
            "transfer": {"slice", "peer"},
            "wait": {"cause"},
        }
        missing = [name for name in sorted(needed.get(self.kind, ())) if getattr(self, name) is None]
        if missing:
            raise ValueError(f"a {self.kind} without its {' and '.join(missing)}")
        return self


class MeasuredStep(Sparse):
    """One step, or one of the batches of a step that has several, as long as it took rank 0.

    Attributes:
        step: Which step, counted from 1.
        start_s: When it began.
        end_s: When it ended.
        devices: Each device's spans, by their start.
    """

    step: Annotated[int, Field(ge=1)]
    start_s: float
    end_s: float
    devices: tuple[tuple[MeasuredSpan, ...], ...]


class MeasuredTimeline(Artifact):
    """timeline.json. Seconds since rank 0 began the first of `steps`.

    Attributes:
        plan_sha256: of the plan that was run; slices are its slices, and behind them what plans for sets of
            its tasks have besides (`Plan.every_slice`).
        clock_error_s: no device's times are further off rank 0's clock than this.
        steps: consecutive, the run's last.
    """

    KIND: ClassVar[str] = "timeline"

    schema_: Annotated[Literal["spindle.timeline/1"], Field(alias="schema")] = "spindle.timeline/1"
    plan_sha256: str
    clock_error_s: Annotated[float, Field(ge=0)]
    steps: tuple[MeasuredStep, ...]

    def require_of(self, plan_sha256: str, num_slices: int, num_devices: int, *, where: Path) -> None:
        """Refuse a timeline of another plan's run; `where`: its file.

        Raises:
            InputError: it is one.
        """
        hint = "Give the folder of a run by this plan."
        if self.plan_sha256 != plan_sha256:
            raise InputError(
                f"{where}: it is of a run by another plan ({shown(self.plan_sha256[:19])}..., "
                f"this one is {plan_sha256[:19]}...)",
                hint=hint,
            )
        for step in self.steps:
            if len(step.devices) != num_devices:
                raise InputError(
                    f"{where}: step {step.step} has {len(step.devices)} devices, the plan {num_devices}",
                    hint=hint,
                )
            for span in (span for spans in step.devices for span in spans):
                _require_within(span.slice, num_slices, "slice", where)
                _require_within(span.source_slice, num_slices, "slice", where)
                _require_within(span.peer, num_devices, "device", where)


def _require_within(number: int | None, count: int, what: str, where: Path) -> None:
    if number is not None and not 0 <= number < count:
        raise InputError(f"{where}: {what} {number} is not in the plan, which has {count}")
