"""What a problem's plan is like, and the table of what plans were like when they were frozen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spindle_cli.files.writing import write_text

TABLE = Path(__file__).parent / "table.json"


@dataclass(frozen=True)
class Row:
    """One problem planned. Without a plan, only what comes before `exit_code` and with it is known.

    Attributes:
        inputs: digest of the problem's files and options.
        planning_s: processor seconds of the whole command.
        exit_code: of the command: 0 a plan, 4 none fits; None: stopped after its budget of time.
        simulated_s, planned_s: the iteration by the simulator, and as the plan file says.
        lower_bound_s: of compute alone, for any schedule.
        bounds_s: of whole batches by compute alone, of any cut with memory, and with links; those that there
            are.
        peak_memory_gib: by type of device, of the fullest.
        slices: how many the plan has. `idle_devices`: that run nothing.
        plan: digest of the plan file.
        violations: rules that `spindle check` finds broken.
    """

    inputs: str
    planning_s: float
    exit_code: int | None
    simulated_s: float = 0.0
    planned_s: float = 0.0
    lower_bound_s: float = 0.0
    bounds_s: dict[str, float] = field(default_factory=dict)
    peak_memory_gib: dict[str, float] = field(default_factory=dict)
    slices: int = 0
    idle_devices: int = 0
    plan: str = ""
    violations: tuple[str, ...] = ()

    @property
    def has_plan(self) -> bool:
        """Whether there is a plan that breaks no rule."""
        return self.exit_code == 0 and not self.violations

    @property
    def off_simulation(self) -> float:
        """By which share the plan's iteration is longer than the simulated one."""
        return self.planned_s / self.simulated_s - 1

    @property
    def above_bound(self) -> float:
        """By which share the simulated iteration is longer than the bound."""
        return self.simulated_s / self.lower_bound_s - 1

    def over_bound(self, name: str) -> float:
        """How many times one of `bounds_s` the simulated iteration takes."""
        return self.simulated_s / self.bounds_s[name]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        """As `written` has it."""
        return cls(**{**data, "violations": tuple(data.get("violations", ()))})

    def written(self) -> dict[str, Any]:
        """For the table, without what is empty."""
        return {key: value for key, value in asdict(self).items() if value or key == "exit_code"}


@dataclass(frozen=True)
class Table:
    """`machine`, `date`: where and when the plans were made."""

    machine: str
    date: str
    rows: Mapping[str, Row]


def read_table(path: Path = TABLE) -> Table:
    """Read the frozen plans.

    Raises:
        ValueError: it is no such table, with what is wrong.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = {name: Row.of(row) for name, row in data["problems"].items()}
        return Table(data["machine"], data["date"], rows)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: no table of plans ({type(error).__name__}: {error})") from error


def write_table(table: Table, path: Path = TABLE) -> None:
    """A line for each problem, so that a diff shows which have changed."""
    lines = (f"  {json.dumps(name)}: {json.dumps(row.written())}" for name, row in table.rows.items())
    head = f'"machine": {json.dumps(table.machine)},\n "date": {json.dumps(table.date)},'
    write_text(path, f'{{{head}\n "problems": {{\n{_joined(lines)}\n }}\n}}\n')


def _joined(lines: Iterable[str]) -> str:
    return ",\n".join(lines)
