"""The end of a run: the last checkpoint, the trained parameters, and what was measured."""

from __future__ import annotations

from spindle_cli.files.artifact import to_compact_json, write_json
from spindle_cli.files.run_files import PLAN_FILE, PREDICTED_FILE
from spindle_cli.files.runs.timeline import TIMELINE_FILE
from spindle_cli.files.writing import write_text
from spindle_cli.plan.file import write_plan
from spindle_cli.runtime.measuring.comparison import Measured, RankReport, compare, gather_reports
from spindle_cli.runtime.measuring.timeline import Ran, StepProgram, gather_timeline
from spindle_cli.runtime.saving.save import save_model
from spindle_cli.runtime.training import Training


def end(training: Training) -> None:
    """Save what was trained, and hand in what was measured; collective.

    Raises:
        InputError: it cannot be written.
    """
    model, run_dir = training.model, training.request.run_dir
    # A run that is captured is there to be compared, and nobody goes on with it.
    is_captured = training.request.capture_dir is not None
    if not is_captured:
        training.save_in_order()
    training.checkpoints.finish()
    training.tell_checkpoints()
    # Files have no name for complex numbers as wide as float64, in which such a run may compute.
    has_complex = any(parameter.is_complex() for parameter in model.table.parameters.values())
    if not (is_captured and has_complex):
        names = tuple(name for name in model.cuts.by_name if model.table.is_trainable(name))
        save_model(run_dir, training.done, names, model.trained, training.pool.whole)
    hand_in(training)
    training.followers.at_end()


def hand_in(training: Training) -> None:
    """Gather what all ranks measured; rank 0 writes it against the plan's predictions, and the plan beside it
    (its own file may be gone, or another plan's, when somebody reads them). Collective.
    """
    training.stopwatch.close()
    program, run_dir = training.model.program, training.request.run_dir
    timeline = gather_timeline(training.stopwatch, _ran(training))
    reports = gather_reports(RankReport.of(training.stopwatch))
    if training.log is not None:
        assert reports is not None, "rank 0 has them"
        training.log.close()
        assert timeline is not None, "rank 0 has it"
        write_plan(run_dir / PLAN_FILE, program.plan)
        write_text(run_dir / TIMELINE_FILE, to_compact_json(timeline))
        compared = compare(program.plan, _measured(training), reports, training.clock.start_up())
        write_json(run_dir / PREDICTED_FILE, compared)


def _ran(training: Training) -> Ran:
    model = training.model
    parts = {part.tasks: StepProgram(part.program, part.places) for part in model.steps}
    return Ran(model.program.plan, lambda step: parts[model.schedule.of_step(step)], model.sums)


def _measured(training: Training) -> list[Measured]:
    """What each step of this process took, for an iteration of one batch: on average over those of the
    step.
    """
    plans = {part.tasks: part.program.plan for part in training.model.steps}
    batches, first = training.model.train.accumulate, training.steps.start
    steps = [
        (seconds, training.model.schedule.of_step(step))
        for step, seconds in enumerate(training.iterations_s, first)
    ]
    return [
        Measured(seconds / batches, plans[tasks].predicted.iteration_s, tasks) for seconds, tasks in steps
    ]
