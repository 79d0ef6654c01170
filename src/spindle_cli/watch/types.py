"""What the live page shows of a run, as data: polled by the page, printed by `spindle watch --json`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact
from spindle_cli.report.types import RunView

State = Literal["not begun", "starting", "running", "ended", "failed", "stopped", "lost", "gone"]


class WatchData(Artifact):
    """The document of `spindle watch --json`.

    Attributes:
        workload: The workload's name; null: not known.
        strategy: Which strategy made the plan.
        num_devices: Devices of the plan.
        memory_bytes: Bytes of its smallest device.
        state: `not begun`: nobody has launched it yet; `starting`: it has not done a step since it was
            launched; `running`; `ended`: it has done its steps; `failed`; `stopped`: it was asked to end;
            `lost`: its launcher is gone and has not said why; `gone`: its folder is not there any more.
        message: Why it failed or was stopped.
        total_steps: At which it ends; None where that is not known.
        step_s: The median of the latest steps.
        left_s: Seconds until its last step ends, with the evaluations to come; null unless it is running and
            `total_steps` is known.
        last_s: When its newest step was written, in seconds since the epoch.
        now_s: The time now.
        read_share: Of its metrics, what has been read; below 1 while a long run is being read.
        problems: What of its files cannot be read, for people.
        page: Tells apart what only a new page shows: other plans, another measured step.
        run: What the run has done.
    """

    KIND: ClassVar[str] = "watch"

    schema_: Annotated[Literal["spindle.watch/1"], Field(alias="schema")] = "spindle.watch/1"
    workload: str | None
    strategy: str | None
    num_devices: int | None
    memory_bytes: int | None
    state: State
    message: str | None
    total_steps: int | None
    step_s: float | None
    left_s: float | None
    last_s: float | None
    now_s: float
    read_share: float
    problems: tuple[str, ...]
    page: str
    run: RunView
