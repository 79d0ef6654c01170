"""What `spindle plan` reports."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact
from spindle_cli.plan.types import Plan, Predicted, StrategyName
from spindle_cli.plan.unchecked import describe_unchecked
from spindle_cli.units import counted, format_bytes, format_seconds


class PlanReport(Artifact):
    """The document of `spindle plan --json`. `gap`: share by which `compute_s` is above `lower_bound_s`."""

    KIND: ClassVar[str] = "planned"

    schema_: Annotated[Literal["spindle.planned/1"], Field(alias="schema")] = "spindle.planned/1"
    plan: str
    strategy: StrategyName
    num_devices: int
    num_slices: int
    num_waves: int
    gap: float
    predicted: Predicted
    notes: tuple[str, ...]

    @classmethod
    def of(cls, path: str, plan: Plan) -> PlanReport:
        """The report on a plan written to `path`."""
        unchecked = describe_unchecked(plan.unchecked)
        return cls(
            plan=path,
            strategy=plan.strategy,
            num_devices=plan.cluster.num_devices,
            num_slices=len(plan.slices),
            num_waves=len(plan.waves),
            gap=plan.predicted.compute_s / plan.predicted.lower_bound_s - 1,
            predicted=plan.predicted,
            notes=(
                *plan.workload.length_lines,
                *plan.notes,
                *([] if unchecked is None else [unchecked]),
            ),
        )

    def __str__(self) -> str:
        predicted = self.predicted
        lines = [
            f"{self.plan}: {counted(self.num_slices, 'slice')} in {counted(self.num_waves, 'wave')} "
            f"on {counted(self.num_devices, 'device')}",
            f"  iteration   {format_seconds(predicted.iteration_s)}",
            f"    compute   {format_seconds(predicted.compute_s)}, {self.gap:.1%} above the lower bound",
            f"    transfers {format_seconds(predicted.transfer_s)}",
            *([f"    processor {format_seconds(predicted.processor_s)}"] if predicted.processor_s else []),
            f"    sums      {format_seconds(predicted.gradient_sum_s)}",
            f"    optimizer {format_seconds(predicted.optimizer_s)}",
            f"  memory      {format_bytes(max(predicted.peak_memory_bytes))} on the fullest device",
        ]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])
