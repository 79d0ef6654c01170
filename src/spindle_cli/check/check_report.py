"""What `spindle check` reports."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.check.types import Violation
from spindle_cli.files.artifact import Artifact
from spindle_cli.plan.types import Plan
from spindle_cli.units import counted


class CheckReport(Artifact):
    """The document of `spindle check --json`.

    Attributes:
        plan: The plan.
        valid: Whether it breaks no rule.
        num_slices: Slices of the plan.
        num_waves: Waves of the plan.
        num_devices: Devices of its cluster.
        violations: Rules that it breaks.
    """

    KIND: ClassVar[str] = "check"

    schema_: Annotated[Literal["spindle.check/1"], Field(alias="schema")] = "spindle.check/1"
    plan: str
    valid: bool
    num_slices: int
    num_waves: int
    num_devices: int
    violations: tuple[Violation, ...]

    @classmethod
    def of(cls, path: str, plan: Plan, violations: tuple[Violation, ...]) -> CheckReport:
        """The report on a plan read from `path`."""
        return cls(
            plan=path,
            valid=not violations,
            num_slices=len(plan.slices),
            num_waves=len(plan.waves),
            num_devices=plan.cluster.num_devices,
            violations=violations,
        )

    def __str__(self) -> str:
        size = (
            f"{counted(self.num_slices, 'slice')} in {counted(self.num_waves, 'wave')} "
            f"on {counted(self.num_devices, 'device')}"
        )
        if self.valid:
            return f"{self.plan}: valid ({size})"
        count = len(self.violations)
        head = f"{self.plan}: {count} violation{'s' if count > 1 else ''} ({size})"
        return "\n".join([head, *(f"  {violation}" for violation in self.violations)])
