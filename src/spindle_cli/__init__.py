"""Spindle: planner and launcher for multi-task, multi-modal training.

    import spindle_cli as spindle

    spindle.profile(workload, ...)  spindle.plan(profile, cluster, ...)  spindle.Trainer(...)

The public names load torch only when used, so that planning and `spindle --help` never do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spindle_cli.api import plan, profile
    from spindle_cli.files.runs.records import Evaluation
    from spindle_cli.plan.types import Plan
    from spindle_cli.profile.types import Profile
    from spindle_cli.runtime.following.callback import Callback, RunInfo
    from spindle_cli.runtime.results import Step
    from spindle_cli.runtime.trainer import Trainer
    from spindle_cli.workload.types import Constraint, FlowTask, Follows, Task, Workload

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Constraint",
    "Evaluation",
    "FlowTask",
    "Follows",
    "Plan",
    "Profile",
    "RunInfo",
    "Step",
    "Task",
    "Trainer",
    "Workload",
    "__version__",
    "plan",
    "profile",
]

_HOMES = {
    "Callback": "runtime.following.callback",
    "Constraint": "workload.types",
    "Evaluation": "files.runs.records",
    "FlowTask": "workload.types",
    "Follows": "workload.types",
    "Plan": "plan.types",
    "Profile": "profile.types",
    "RunInfo": "runtime.following.callback",
    "Step": "runtime.results",
    "Task": "workload.types",
    "Trainer": "runtime.trainer",
    "Workload": "workload.types",
}


def __getattr__(name: str) -> Any:
    if name in ("plan", "profile"):  # packages that can be called
        return import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
