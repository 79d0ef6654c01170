"""The one file that reads the process environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spindle_cli.errors import UsageError

REQUEST_VARIABLE = "SPINDLE_REQUEST"
RANKS_PER_GPU_VARIABLE = "SPINDLE_RANKS_PER_GPU"


@dataclass(frozen=True)
class WorkerEnvironment:
    """What torchrun tells a worker: its rank among all, its rank on its node, and where the workers meet.

    `backend`: of torch.distributed in place of the request's, for tests (docs/testing.md).
    `request`: what `spindle launch` asks of a worker that runs a script of the user's.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_address: str
    master_port: int
    backend: str | None = None
    request: Path | None = None

    @classmethod
    def read(cls) -> WorkerEnvironment:
        """This process's own.

        Raises:
            UsageError: the process was not started by torchrun, or a variable of ours is no value of it.
        """
        ranks_per_gpu()
        missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
        if missing:
            raise UsageError(
                f"{missing[0]} is not set: a worker is started by torchrun, not by hand",
                hint="Use `spindle launch PLAN.yaml`; with --dry-run it prints the command.",
            )
        return cls(
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            master_address=os.environ["MASTER_ADDR"],
            master_port=int(os.environ["MASTER_PORT"]),
            backend=os.environ.get("SPINDLE_BACKEND") or None,
            request=Path(request) if (request := os.environ.get(REQUEST_VARIABLE)) else None,
        )


_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# By which others know of such a place: torch.distributed.is_torchelastic_launched, and code that asks Slurm
# or MPI, whose numbers are those of launchers, one on each node.
_TOLD_BY = (
    *_TORCHRUN_VARIABLES,
    *("TORCHELASTIC_RUN_ID", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES"),
    *("SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"),
)


@contextmanager
def without_ranks() -> Iterator[None]:
    """Inside, this process does not know what torchrun, Slurm or MPI have said of its place among others."""
    hidden = {name: os.environ.pop(name) for name in _TOLD_BY if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def child_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `additions`, for a child process."""
    return {**os.environ, **additions}


def join_environment(additions: Mapping[str, str]) -> None:
    """Make this process's environment that of the worker that it becomes."""
    os.environ.update(additions)


def is_chosen(name: str) -> bool:
    """Say whether the user has set an environment variable."""
    return bool(os.environ.get(name))


def set_unless_chosen(defaults: Mapping[str, str]) -> None:
    """Set variables for the libraries in this process, but for those that the user has set."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def chosen_interface() -> str | None:
    """The network interface that the user has chosen for the workers, if any; the name is gloo's own."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def ranks_per_gpu() -> int:
    """How many ranks share each GPU, by SPINDLE_RANKS_PER_GPU: one, but in tests (docs/gpu.md).

    Raises:
        UsageError: it is no number of ranks.
    """
    text = os.environ.get(RANKS_PER_GPU_VARIABLE) or "1"
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(
            f"{RANKS_PER_GPU_VARIABLE}={text}: expected a number of ranks, 1 or more", hint="Unset it."
        )
    return int(text)


def chosen_threads() -> int | None:
    """The threads that the user has chosen for each process, by OMP_NUM_THREADS; None: not chosen.

    Raises:
        UsageError: it is no number of threads.
    """
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # a list is by level of nesting
    if not text:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(
            f"OMP_NUM_THREADS={text}: expected a number of threads, 1 or more",
            hint="Set it anew, or unset it.",
        )
    return int(text)
