"""What a user writes to follow a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.runtime.results import Step

if TYPE_CHECKING:
    from spindle_cli.files.runs.records import Evaluation
    from spindle_cli.workload.file import TrainSettings


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run before its first step.

    `first_step`: the first that these workers train, counted from 1; more than 1 where a run goes on.
    `set_value`: given the name of a number that a task declares for callbacks to set ('task/beta', of
    `Task.step_values`) and a number, lets every rank read it in all steps that have not begun. What rank 0
    says counts.
    """

    workload: str
    run_dir: Path
    rank: int
    first_step: int
    total_steps: int
    train: TrainSettings
    set_value: Callable[[str, float], None] = field(repr=False)


class Callback:
    """Follows a run: derive from it, and override what is wanted.

    `on_every_rank`: else it is called on rank 0 alone. What it raises ends the run with that as its error.
    A callback of every rank is called at the same points on all of them.
    """

    on_every_rank = False

    def at_start(self, run: RunInfo) -> None:
        """Called before the first step."""

    def after_step(self, step: Step) -> None:
        """When a step's results are there: while the device is at the next step already."""

    def at_checkpoint(self, step: int, folder: Path) -> None:
        """A checkpoint after so many steps is in `folder`, whole."""

    def at_evaluation(self, evaluation: Evaluation) -> None:
        """Called when a task was evaluated."""

    def at_end(self) -> None:
        """After the last step, its checkpoint and evaluations; not where the run fails or is stopped."""
