"""`spindle export`: a run's newest checkpoint as files that the user's own modules load.

The workload is built without its parameters, to know the names; the tensors then go from the checkpoint into
the files one by one.
"""

from __future__ import annotations

from pathlib import Path

from spindle_cli.checkpoint.files import find_checkpoint
from spindle_cli.errors import UsageError
from spindle_cli.export.folder import write_folder
from spindle_cli.export.selection import select
from spindle_cli.export.trained import trained_model
from spindle_cli.export.types import DEFAULT_SHARD_BYTES, Exported, ExportOptions
from spindle_cli.runtime.saving.save import write_model


def export_run(run_dir: Path, output: Path, options: ExportOptions | None = None) -> Exported:
    """Write a run's model.

    Args:
        run_dir: the run's folder.
        output: the file, or the folder where the options ask for one. Its keys are those of the tasks'
            `state_dict()`: `<task>.<dotted name>`, a shared parameter under each of its names; with a task,
            that task's alone and without its name.
        options: what is written; everything if None.

    Raises:
        InputError: the run has no whole checkpoint, or it is not of this workload; the files cannot be
            written.
        WorkloadError: the workload cannot be built.
        UsageError: there is no such task, or an option does not go with another or with the model.
    """
    chosen = options or ExportOptions()
    require_consistent(chosen)
    stored = find_checkpoint(run_dir, reads_all=True)
    with trained_model(
        stored, chosen.workload or stored.checkpoint.workload, averaged=chosen.averaged
    ) as model:
        selection = select(model, chosen)
        if chosen.is_folder:
            files = write_folder(output, selection, chosen.shard_bytes or DEFAULT_SHARD_BYTES)
        else:
            write_model(output, selection.specs, selection.read)
            files = {}
        tasks = tuple(model.roots)
    return Exported(
        file=str(output),
        files=tuple(files),
        run_dir=str(run_dir),
        step=stored.checkpoint.step,
        tasks=(chosen.task,) if chosen.task is not None else tasks,
        tensors=len(selection.specs),
        num_bytes=sum(files.values()) if files else output.stat().st_size,
        skipped=stored.skipped,
    )


def require_consistent(options: ExportOptions) -> None:
    """Refuse options that do not go together.

    Raises:
        UsageError: naming both.
    """
    if options.like is not None and (options.task is not None or options.module is not None):
        raise UsageError("--like takes what a source of init_from has, of whichever task: leave out --task")
    if options.like is not None and options.peft == "adapters":
        raise UsageError("--like has the names of before, where adapters have none: --peft merged, or none")
    if options.module is not None and options.task is None:
        raise UsageError("--module names a module of a task: give --task, too")
    if options.peft is not None and options.task is None and options.like is None:
        raise UsageError("--peft is of one task's model: give --task, too")
