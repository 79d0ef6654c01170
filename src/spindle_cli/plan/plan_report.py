"""What `spindle plan` reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.traffic import communicator_bytes
from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.files.sharding import Sharding, WeightReport, describe_weights, weight_reports
from spindle_cli.plan.islands.said import IslandsReport, islands_report
from spindle_cli.plan.types import Plan, Predicted, StrategyName, describe_bounds
from spindle_cli.units import counted, format_bytes, format_seconds


class SetReport(Model):
    """What is predicted of the steps that run the same tasks.

    Attributes:
        tasks: The tasks.
        share: Which part of all steps they are.
        iteration_s: Seconds of such a step.
        peak_memory_bytes: Bytes on the fullest device.
    """

    tasks: tuple[str, ...]
    share: float
    iteration_s: float
    peak_memory_bytes: int


class PlanReport(Artifact):
    """The document of `spindle plan --json`.

    Attributes:
        plan: The plan file.
        strategy: Which strategy made it.
        num_devices: Devices of the cluster; with islands, of each of them.
        num_slices: Slices of the plan.
        num_waves: Waves of the plan.
        gap: Share by which `compute_s` is above `lower_bound_s`.
        predicted: What is predicted; where not every step runs all tasks, of one that would.
        mean_iteration_s: Mean seconds of all steps, by the shares of `task_sets`.
        peak_memory_bytes: The most bytes that a device needs in any step.
        micro_batches: By task, into how many micro-batches its batch is cut.
        sharding: By key of parameters, what devices share out.
        shard_weights: How much of what devices share out each has, where that is not the same for all.
        memory: Bytes of the fullest device at its fullest moment, by what takes them; empty where steps run
            several sets of tasks.
        task_sets: The sets of tasks that steps run, where not every step runs all.
        islands: Where these average only now and then, what that takes; all else is of one of them.
        notes: What the planner has to say.
    """

    KIND: ClassVar[str] = "planned"

    schema_: Annotated[Literal["spindle.planned/1"], Field(alias="schema")] = "spindle.planned/1"
    plan: str
    strategy: StrategyName
    num_devices: int
    num_slices: int
    num_waves: int
    gap: float
    predicted: Predicted
    mean_iteration_s: float
    peak_memory_bytes: int
    micro_batches: dict[str, int] = Field(default_factory=dict)
    sharding: dict[str, Sharding] = Field(default_factory=dict)
    shard_weights: tuple[WeightReport, ...] = ()
    memory: dict[str, int] = Field(default_factory=dict)
    task_sets: tuple[SetReport, ...] = ()
    islands: IslandsReport | None = None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, path: str, plan: Plan) -> PlanReport:
        """The report on a plan written to `path`."""
        unchecked = describe_unchecked(plan.unchecked)
        predicted = [task_set.predicted for task_set in plan.task_sets] or [plan.predicted]
        return cls(
            plan=path,
            strategy=plan.strategy,
            num_devices=plan.cluster.num_devices,
            num_slices=len(plan.slices),
            num_waves=len(plan.waves),
            gap=plan.predicted.compute_s / plan.predicted.lower_bound_s - 1,
            predicted=plan.predicted,
            mean_iteration_s=plan.mean_iteration_s,
            peak_memory_bytes=max(max(of_set.peak_memory_bytes) for of_set in predicted),
            micro_batches=plan.micro_batches,
            sharding=plan.sharding,
            shard_weights=weight_reports(plan.shard_weights, plan.cluster),
            memory=_fullest(plan),
            task_sets=tuple(
                SetReport(
                    tasks=task_set.tasks,
                    share=task_set.share,
                    iteration_s=task_set.predicted.iteration_s,
                    peak_memory_bytes=max(task_set.predicted.peak_memory_bytes),
                )
                for task_set in plan.task_sets
            ),
            islands=islands_report(plan),
            notes=(
                *plan.workload.length_lines,
                *plan.notes,
                *([] if unchecked is None else [unchecked]),
            ),
        )

    def __str__(self) -> str:
        where = "" if self.islands is None else f" of each of {self.islands.islands} islands"
        lines = [
            f"{self.plan}: {counted(self.num_slices, 'slice')} in {counted(self.num_waves, 'wave')} "
            f"on {counted(self.num_devices, 'device')}{where}",
            *self._of_sets(),
            *self._of_iteration(),
            f"  memory      {format_bytes(max(self.predicted.peak_memory_bytes))} on the fullest device",
            *[f"    {format_bytes(size):>10} {part}" for part, size in self.memory.items() if size],
        ]
        if self.micro_batches:
            cut = ", ".join(f"{task} in {count}" for task, count in self.micro_batches.items())
            lines.append(f"  batches     cut into micro-batches: {cut}")
        if self.sharding:
            levels = ", ".join(f"{level} of {key}" for key, level in self.sharding.items())
            lines.append(f"  shared out  {levels}")
        if self.shard_weights:
            lines.append(f"  shared out  {describe_weights(self.shard_weights)}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def _of_iteration(self) -> list[str]:
        """The seconds of an iteration, and what takes them."""
        predicted, least = self.predicted, describe_bounds(self.predicted)
        return [
            f"  iteration   {format_seconds(predicted.iteration_s)}"
            + (", of a step that runs all tasks" if self.task_sets else ""),
            f"    compute   {format_seconds(predicted.compute_s)}, {abs(self.gap):.1%} "
            + ("above the lower bound" if self.gap >= 0 else "below the bound of version 1"),
            *([] if least is None else [f"    at least  {least}"]),
            f"    transfers {format_seconds(predicted.transfer_s)}",
            *([f"    processor {format_seconds(predicted.processor_s)}"] if predicted.processor_s else []),
            f"    sums      {format_seconds(predicted.gradient_sum_s)}",
            f"    optimizer {format_seconds(predicted.optimizer_s)}",
            *([f"    held up   {format_seconds(predicted.held_up_s)}"] if predicted.held_up_s else []),
        ]

    def _of_sets(self) -> list[str]:
        """Time by the mean of the steps, memory by the worst."""
        if not self.task_sets:
            return []
        return [
            f"  step        {format_seconds(self.mean_iteration_s)} in the mean of the steps, "
            f"{format_bytes(self.peak_memory_bytes)} at worst on the fullest device",
            *(
                f"    {task_set.share:6.1%}  {format_seconds(task_set.iteration_s)}, "
                f"{format_bytes(task_set.peak_memory_bytes)}: {', '.join(task_set.tasks)}"
                for task_set in self.task_sets
            ),
        ]


def _fullest(plan: Plan) -> dict[str, int]:
    """By what takes it, the memory of the device that needs most; of the first of equals."""
    if plan.task_sets:
        return {}
    needs = device_memory(plan.metaops, plan.slices, plan.cluster, plan, communicator_bytes(plan))
    return max(needs, key=lambda need: need.total_bytes).parts


_NAMED = 3


def describe_unchecked(unchecked: Mapping[str, str]) -> str | None:
    """The line for `Plan.unchecked`; None: there is nothing to say."""
    if not unchecked:
        return None
    by_reason: dict[str, list[str]] = {}
    for name, why in unchecked.items():
        by_reason.setdefault(why, []).append(name)
    parts = [
        f"{counted(len(names), 'part') if len(names) > _NAMED else ', '.join(names)} ({why})"
        for why, names in by_reason.items()
    ]
    return f"not checked by numbers: {'; '.join(parts)}. `spindle verify` checks a whole run"
