"""Where a verification's two runs go, and how much room they need."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.errors import SpindleError, UsageError
from spindle_cli.plan.types import Plan

if TYPE_CHECKING:
    from spindle_cli.workload.graph import WorkloadGraph


@contextmanager
def verify_folder(wanted: Path | None) -> Iterator[Path]:
    """`wanted`, which is kept, or a temporary folder, kept only when a run fails in it.

    Raises:
        UsageError: `wanted` holds something already.
    """
    if wanted is not None:
        if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
            raise UsageError(f"--run-dir {wanted}: it is not an empty folder", hint="Choose another one.")
        yield wanted
        return
    folder = Path(tempfile.mkdtemp(prefix="spindle-verify-"))
    try:
        yield folder
    except SpindleError:
        if not any(folder.iterdir()):
            folder.rmdir()
        raise  # its message names the log that is in the folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def captured_bytes(plan: Plan, buffer_bytes: int, *, averages: bool = False) -> int:
    """At most this many bytes are captured, of the plain run and of every device: parameters in three stages,
    or with `averages` in four, and buffers (`buffer_bytes` in all) in two.

    A device is counted with every slice that it runs, although slices may share parameters, and with all
    buffers.
    """
    once = sum(_param_bytes(plan, metaop.name, (0, metaop.num_ops)) for metaop in plan.metaops)
    held = sum(_param_bytes(plan, piece.metaop, piece.ops) * len(piece.devices) for piece in plan.slices)
    return (3 + averages) * (once + held) + 2 * buffer_bytes * (1 + plan.cluster.num_devices)


def buffer_bytes(graph: WorkloadGraph) -> int:
    """The bytes of all buffers that ops use."""
    from spindle_cli.workload.parameters import ParameterTable

    return sum(buffer.numel() * buffer.itemsize for buffer in ParameterTable.of(graph).buffers.values())


def _param_bytes(plan: Plan, metaop: str, ops: tuple[int, int]) -> int:
    entry = plan.by_name[metaop]
    extra = sum(size for op, size in entry.extra_param_bytes.items() if ops[0] <= op < ops[1])
    return (ops[1] - ops[0]) * entry.param_bytes_per_op + extra
