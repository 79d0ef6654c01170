"""Spindle: planner and launcher for multi-task, multi-modal training.

The public names load torch only when used, so that planning and `spindle --help` never do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spindle_cli.workload.types import FlowTask, Task, Workload

__version__ = "0.1.0"
__all__ = ["FlowTask", "Task", "Workload", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("FlowTask", "Task", "Workload"):
        from spindle_cli.workload import types

        return getattr(types, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
