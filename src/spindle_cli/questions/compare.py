"""Every strategy's plan for one profile and cluster, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field
from rich import box
from rich.table import Table

from spindle_cli.errors import NoPlanError
from spindle_cli.files.artifact import Artifact
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan, StrategyName, strategies_on
from spindle_cli.profile.types import Profile, TaskShare
from spindle_cli.questions.spending import Spending, known_figures, spending_of
from spindle_cli.units import counted, format_bytes, format_seconds


class StrategyOutcome(Spending):
    """One strategy's prediction (`Plan.of_steps`), and what an iteration takes.

    Attributes:
        strategy: Name of the strategy.
        iteration_s: Seconds of an iteration.
        compute_s: End of the schedule.
        transfer_s: What transfers add to it.
        processor_s: What communication and reading take of processors that compute.
        gradient_sum_s: What gradient sums add.
        optimizer_s: What the optimizer's step adds.
        over_bound: compute_s over lower_bound_s, less 1.
        speedup: Sequential's iteration over this one's.
        peak_memory_bytes: Bytes that the fullest device holds.
        num_slices: Slices of the plan.
        notes: What the planner has to say.
        failure: Why nothing fits; the figures are then null.
    """

    strategy: StrategyName
    iteration_s: float | None = None
    compute_s: float | None = None
    transfer_s: float | None = None
    processor_s: float | None = None
    gradient_sum_s: float | None = None
    optimizer_s: float | None = None
    over_bound: float | None = None
    speedup: float | None = None
    peak_memory_bytes: int | None = None
    num_slices: int | None = None
    notes: tuple[str, ...] = ()
    failure: str | None = None


class Comparison(Artifact):
    """The document of `spindle compare --json`.

    Attributes:
        workload: Name of the workload.
        cluster: Name of the cluster.
        num_devices: Devices of the cluster.
        lower_bound_s: Seconds that no schedule can be shorter than; null where nothing fits.
        task_sets: Where not every step runs all tasks, the sets of them that seconds are the mean of, by
            their shares.
        strategies: What each strategy does.
    """

    KIND: ClassVar[str] = "comparison"

    schema_: Annotated[Literal["spindle.comparison/1"], Field(alias="schema")] = "spindle.comparison/1"
    workload: str
    cluster: str
    num_devices: int
    lower_bound_s: float | None
    task_sets: tuple[TaskShare, ...] = ()
    strategies: tuple[StrategyOutcome, ...]


class Outcomes(NamedTuple):
    """What each strategy does on a cluster; `lower_bound_s` and `no_plan` where any has a plan, or none."""

    rows: tuple[StrategyOutcome, ...]
    lower_bound_s: float | None
    no_plan: NoPlanError | None


def outcomes_on(profile: Profile, cluster: Cluster) -> Outcomes:
    """Plan with every strategy; that one has no plan is its outcome."""
    plans: dict[StrategyName, Plan] = {}
    failures: dict[StrategyName, NoPlanError] = {}
    for strategy in strategies_on(cluster):
        try:
            plans[strategy] = make_plan(profile, cluster, strategy)
        except NoPlanError as error:
            failures[strategy] = error
    sequential = plans.get("sequential")
    rows = tuple(
        outcome_of(plans[strategy], sequential)
        if strategy in plans
        else StrategyOutcome(strategy=strategy, failure=failures[strategy].message)
        for strategy in strategies_on(cluster)
    )
    if not plans:
        return Outcomes(rows, None, next(iter(failures.values())))
    return Outcomes(rows, next(iter(plans.values())).of_steps.lower_bound_s, None)


def compare(profile: Profile, cluster: Cluster) -> Comparison:
    """Plan with every strategy.

    Raises:
        NoPlanError: no strategy has a plan that fits.
    """
    outcomes = outcomes_on(profile, cluster)
    if outcomes.no_plan is not None:
        raise outcomes.no_plan
    return Comparison(
        workload=profile.workload.name,
        cluster=cluster.name,
        num_devices=cluster.num_devices,
        lower_bound_s=outcomes.lower_bound_s,
        task_sets=profile.task_sets,
        strategies=outcomes.rows,
    )


def outcome_of(plan: Plan, sequential: Plan | None) -> StrategyOutcome:
    """Return a plan's prediction as a row of a comparison."""
    predicted = plan.of_steps
    return StrategyOutcome(
        strategy=plan.strategy,
        iteration_s=predicted.iteration_s,
        compute_s=predicted.compute_s,
        transfer_s=predicted.transfer_s,
        processor_s=predicted.processor_s,
        gradient_sum_s=predicted.gradient_sum_s,
        optimizer_s=predicted.optimizer_s,
        over_bound=predicted.compute_s / predicted.lower_bound_s - 1,
        speedup=None if sequential is None else sequential.of_steps.iteration_s / predicted.iteration_s,
        peak_memory_bytes=max(predicted.peak_memory_bytes),
        num_slices=len(plan.every_slice),
        notes=plan.notes,
        **dict(spending_of(plan)),
    )


def comparison_table(comparison: Comparison) -> Table:
    """Return a row for each strategy, in the contract's order."""
    table = Table(
        title=f"{comparison.workload} on {comparison.cluster}: {counted(comparison.num_devices, 'device')}"
        + of_sets(comparison.task_sets),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("strategy", no_wrap=True)
    for name in (
        "iteration",
        "speed-up",
        "compute",
        "above bound",
        "transfers",
        "processor",
        "sums",
        "optimizer",
        "memory",
        "slices",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison.strategies:
        table.add_row(row.strategy, *_cells(row))
    return table


def spending_table(comparison: Comparison) -> Table | None:
    """Return what an iteration takes, a row for each strategy; None where nothing is known of it. It is a
    table of its own, since the other is as wide as a terminal.
    """
    figures = known_figures(comparison.strategies)
    if not figures:
        return None
    table = Table(title="of an iteration", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    for figure in figures:
        table.add_column(figure.title, justify="right", no_wrap=True)
    for row in comparison.strategies:
        table.add_row(row.strategy, *(figure.cell(row) for figure in figures))
    return table


def of_sets(task_sets: Sequence[TaskShare]) -> str:
    """Return what figures are of, behind a title; nothing where every step runs all tasks."""
    if not task_sets:
        return ""
    shown = "; ".join(f"{task_share.share:.0%} {', '.join(task_share.tasks)}" for task_share in task_sets)
    return f"\nseconds: the mean of the steps, memory: the most in any ({shown})"


def _cells(row: StrategyOutcome) -> tuple[str, ...]:
    if row.iteration_s is None:
        return ("no plan", *("" for _ in range(9)))
    return (
        format_seconds(row.iteration_s),
        "" if row.speedup is None else f"{row.speedup:.2f}x",
        format_seconds(row.compute_s or 0.0),
        f"{row.over_bound or 0.0:.1%}",
        format_seconds(row.transfer_s or 0.0),
        format_seconds(row.processor_s or 0.0),
        format_seconds(row.gradient_sum_s or 0.0),
        format_seconds(row.optimizer_s or 0.0),
        format_bytes(row.peak_memory_bytes or 0),
        str(row.num_slices),
    )
