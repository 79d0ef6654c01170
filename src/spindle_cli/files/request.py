"""What `launch` hands to every worker, and what a dying worker hands back.

`launch` writes one `RunRequest` per node and starts `python -m <worker module> REQUEST.json` once per device;
nothing else passes between the two but the files named here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from spindle_cli.errors import ExitCode
from spindle_cli.files.artifact import Artifact, Model

STOP_FILE = "stop"
CaptureStage = Literal["initial", "gradients", "final", "average", "initial-buffers", "final-buffers"]
# Of a run that is not traced: enough to take one that is like the others.
TIMELINE_STEPS = 3

DtypeName = Literal["float32", "float64"]


class SeenData(Model):
    """What was seen of a task's dataset.

    Attributes:
        num_samples: Samples that it has; null: it is a stream.
        samples: Digests of some samples, by index; of a stream, of the first.
    """

    num_samples: Annotated[int, Field(ge=0)] | None
    samples: dict[int, str] = Field(default_factory=dict)


class RunRequest(Artifact):
    """One run of a plan, as every worker of it reads it. All paths are absolute.

    Attributes:
        plan: The plan file.
        workload: Source of the workload (file or function), as `workload.load` takes it.
        memo: What the launcher has just found of the workload (analysis/memo.py), for workers to read; None:
            they find it all by themselves.
        steps: Iterations to train; None: as many as the workload's train settings say.
        run_dir: Where metrics.jsonl, predicted.json, checkpoints/ and workers/ go. It exists.
        resume: Go on from the newest checkpoint in `run_dir`.
        resume_step: Go on from the checkpoint after this step instead.
        begin_from: Where there is nothing to resume, begin from the checkpoint of this other run, possibly of
            other tasks.
        begin_step: Begin from its checkpoint after this step; null: from its newest.
        checkpoint_every: Steps from one checkpoint to the next; null: only at the end.
        keep: How many checkpoints are kept.
        async_checkpoints: Whether they are written while training goes on.
        datasets: What was seen of each task's data, for the checkpoints.
        device_type: Torch device type of every worker, 'cpu' or 'cuda'.
        backend: Of torch.distributed, 'gloo' or 'nccl'.
        threads: Torch threads of each process.
        timeout_s: Seconds without an answer after which a collective or transfer fails.
        dtype: Convert every floating-point parameter, buffer and batch field to this; None: leave them be.
        no_randomness: Dropout drops nothing, and other draws are their means.
        timeline_steps: So many of the last steps go into timeline.json.
        traces: Whether it has the time that each sum and gather takes, which costs a little.
        begun_s: When the command began, and when it started the workers (seconds since the epoch); None where
            nobody measures.
        started_s: When the command began, and when it started the workers (seconds since the epoch); None
            where nobody measures.
        islands: Groups of workers, in the order of their ranks, that train copies of the model
            (`train.local_sgd`).
        island: Which of them a request is for, as its workers see it; what it writes is in `island_dir`.
        outer_every: Steps from one average of them to the next, in place of what the train settings say.
        script: A script of the user's, which the workers run instead of training by themselves; null: there
            is none.
        script_args: Its arguments.
        capture_dir: Where each rank writes what `verify` compares (see `capture_path`); None: nothing.
    """

    KIND: ClassVar[str] = "run-request"

    schema_: Annotated[Literal["spindle.run-request/1"], Field(alias="schema")] = "spindle.run-request/1"
    plan: Path
    workload: str
    memo: Path | None = None
    steps: Annotated[int, Field(ge=1)] | None = None
    run_dir: Path
    resume: bool = False
    resume_step: Annotated[int, Field(ge=1)] | None = None
    begin_from: Path | None = None
    begin_step: Annotated[int, Field(ge=1)] | None = None
    checkpoint_every: Annotated[int, Field(ge=1)] | None = None
    keep: Annotated[int, Field(ge=1)] = 3
    async_checkpoints: bool = False
    datasets: dict[str, SeenData] = Field(default_factory=dict)
    device_type: str = "cpu"
    backend: Literal["gloo", "nccl"] = "gloo"
    threads: Annotated[int, Field(ge=1)] = 1
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    dtype: DtypeName | None = None
    no_randomness: bool = False
    timeline_steps: Annotated[int, Field(ge=1)] = TIMELINE_STEPS
    traces: bool = False
    begun_s: Annotated[float, Field(ge=0)] | None = None
    started_s: Annotated[float, Field(ge=0)] | None = None
    islands: Annotated[int, Field(ge=1)] = 1
    island: Annotated[int, Field(ge=0)] = 0
    outer_every: Annotated[int, Field(ge=1)] | None = None
    script: Path | None = None
    script_args: tuple[str, ...] = ()
    capture_dir: Path | None = None


def _one_of_ours(code: int) -> ExitCode:
    # The enum by itself is no validator: older pydantic gives what takes two arguments another one.
    return ExitCode(code)


class WorkerError(Artifact):
    """The error that ended one worker, written to `error_path` before it exits.

    Attributes:
        rank: Of the worker.
        type: Name of the exception's class.
        message: What has failed, for people.
        hint: What to do about it; with `message` all that is shown of a `SpindleError`.
        place: 'file:line in function' of the innermost frame in the user's own code, else of all frames.
        traceback: The whole of it, for the log; None where `self_explaining`.
        lost_peer: It lost its connection to another worker, so that one's error is what matters.
        timed_out: And that because the other did not answer in time.
        may_pass: What failed is outside of the program (a disk, a network, a device), so that to start again
            may help.
        self_explaining: The exception is a `SpindleError`: its message stands without a traceback.
        exit_code: What the command should end with.
        time_s: Seconds since the epoch, to tell the first error from those that follow from it.
    """

    KIND: ClassVar[str] = "worker-error"

    schema_: Annotated[Literal["spindle.worker-error/1"], Field(alias="schema")] = "spindle.worker-error/1"
    rank: Annotated[int, Field(ge=0)]
    type: str
    message: str
    hint: str | None = None
    place: str | None = None
    traceback: str | None = None
    lost_peer: bool = False
    timed_out: bool = False
    may_pass: bool = False
    self_explaining: bool = False
    exit_code: Annotated[int, AfterValidator(_one_of_ours)] = 1
    time_s: Annotated[float, Field(ge=0)]


def island_dir(run_dir: Path, island: int) -> Path:
    """Where an island leaves what is its own: the first in the run's folder itself, so that this is like that
    of any other run.
    """
    return run_dir if island == 0 else run_dir / "islands" / str(island)


def workers_dir(run_dir: Path) -> Path:
    """Folder of the workers' output and errors."""
    return run_dir / "workers"


def stop_path(run_dir: Path) -> Path:
    """A file that asks the workers to save a checkpoint and end, once it is there."""
    return workers_dir(run_dir) / STOP_FILE


def memo_path(run_dir: Path, node_rank: int) -> Path:
    """What a node's launcher hands to its workers of what it has found of the workload."""
    return workers_dir(run_dir) / f"node-{node_rank}.memo.json"


def log_path(run_dir: Path, rank: int) -> Path:
    """Where a worker's standard output and standard error go."""
    return workers_dir(run_dir) / f"rank-{rank:05d}.log"


def error_path(run_dir: Path, rank: int) -> Path:
    """Where a dying worker writes its `WorkerError`."""
    return workers_dir(run_dir) / f"rank-{rank:05d}.error.json"


def done_path(run_dir: Path, rank: int) -> Path:
    """What a worker leaves when it has come to the end of its work."""
    return workers_dir(run_dir) / f"rank-{rank:05d}.done"


def pid_path(run_dir: Path, rank: int) -> Path:
    """Where a worker writes its process id."""
    return workers_dir(run_dir) / f"rank-{rank:05d}.pid"


def stack_path(run_dir: Path, rank: int) -> Path:
    """Where a worker writes the stack of its threads when it gets SIGUSR1."""
    return workers_dir(run_dir) / f"rank-{rank:05d}.stack"


def journal_path(run_dir: Path, rank: int) -> Path:
    """Where a worker notes at which action it is (see run_files.py)."""
    return workers_dir(run_dir) / f"rank-{rank:05d}.journal"


def capture_path(capture_dir: Path, stage: CaptureStage, rank: int) -> Path:
    """A safetensors file {canonical name: tensor} of *every* parameter, or buffer, that `rank` holds.

    Not only of those that it is the first to hold: every copy is written, so that a stale one can be told.
    Stages: 'initial' before the first step; 'gradients' of the first step after the gradient sums (parameters
    that have none are left out); 'final' after the last step, and 'average' of the weights then, where the
    run keeps one; buffers before the first and after the last.
    """
    return capture_dir / f"rank-{rank:05d}.{stage}.safetensors"
