"""What `launch` is about to run, as data: it is printed by `--dry-run`, or started."""

from __future__ import annotations

import shlex
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact, Model, to_json
from spindle_cli.files.request import DtypeName, RunRequest

RUNTIME_WORKER = "spindle_cli.runtime.worker"
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Address:
    """Where the nodes meet: on node 0. Port 0 lets the kernel choose a free one (one node only)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class NodeShare:
    """This node among the nodes of a run, and the network interface that its workers use."""

    rank: int
    num_nodes: int
    processes: int
    master: Address
    interface: str


@dataclass(frozen=True)
class LaunchOptions:
    """What the user, or `verify`, asks of a run beyond its plan. See `RunRequest` for the shared fields.

    `begin_from`: the folder of another run, or of one of its checkpoints.
    `script`: a script of the user's that the workers run, with `script_args`.
    `restarts`: how often the run is started again by itself after a worker was lost.
    `outer_every`: steps from one outer step of islands to the next, instead of what the workload says.
    """

    steps: int | None = None
    resume: bool = False
    begin_from: Path | None = None
    checkpoint_every: int | None = None
    keep: int = 3
    async_checkpoints: bool = False
    outer_every: int | None = None
    traced_steps: int | None = None
    threads: int = 1
    timeout_s: float = DEFAULT_TIMEOUT_S
    restarts: int = 0
    dtype: DtypeName | None = None
    no_randomness: bool = False
    capture_dir: Path | None = None
    script: Path | None = None
    script_args: tuple[str, ...] = ()
    worker_module: str = RUNTIME_WORKER


class Launch(Artifact):
    """One node's part of a run: the file to write, the command to start, and what its environment adds.

    Attributes:
        num_nodes: Nodes of the run.
        node_rank: Which of them this is.
        processes: Workers on this node, one per device.
        run_dir: The run's folder; made if missing.
        request_file: Where `request` is written for the workers.
        request: What all workers read.
        environment: Variables added to the launcher's own.
        argv: The command.
        log: Where the command's output goes; each worker's goes to a log of its own beside it.
        exits_file: Where the command tells which workers died, and how.
        restarts: How often this is started again, from the newest checkpoint, after a worker was lost.
    """

    KIND: ClassVar[str] = "launch"

    schema_: Annotated[Literal["spindle.launch/1"], Field(alias="schema")] = "spindle.launch/1"
    num_nodes: Annotated[int, Field(ge=1)]
    node_rank: Annotated[int, Field(ge=0)]
    processes: Annotated[int, Field(ge=1)]
    run_dir: Path
    request_file: Path
    request: RunRequest
    environment: dict[str, str]
    argv: tuple[str, ...]
    log: Path
    exits_file: Path
    restarts: Annotated[int, Field(ge=0)] = 0

    def shell_script(self) -> str:
        """Write the folder, the request file and the command of one node, ready to paste: what `--dry-run`
        prints; running it does what `launch` would start.
        """
        request = self.request
        where = f"node {self.node_rank} of {self.num_nodes}: " if self.num_nodes > 1 else ""
        workers = "1 worker" if self.processes == 1 else f"{self.processes} workers"
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return "\n".join(
            [
                f"# {where}{workers} on {request.device_type}, {request.backend}",
                f"mkdir -p {shlex.quote(str(self.request_file.parent))}",
                f"cat > {shlex.quote(str(self.request_file))} <<'END'",
                to_json(request) + "END",
                " ".join(["env", *variables, "\\"]),
                f"  {shlex.join(self.argv)} \\",
                f"  > {shlex.quote(str(self.log))} 2>&1",
            ]
        )


class WorkerExit(Model):
    """How one worker of this node ended badly. `exit_code`: minus the signal's number where one killed it."""

    rank: Annotated[int, Field(ge=0)]
    exit_code: Annotated[int, Field(gt=-signal.NSIG, le=255)]
    time_s: Annotated[float, Field(ge=0)]  # since the epoch, when it was noticed


class WorkerExits(Artifact):
    """Every worker of this node that ended badly; written by the command that starts them.

    `problem`: why none was started, or why those that ran were ended.
    """

    KIND: ClassVar[str] = "worker-exits"

    schema_: Annotated[Literal["spindle.worker-exits/1"], Field(alias="schema")] = "spindle.worker-exits/1"
    exits: tuple[WorkerExit, ...]
    problem: str | None = None
