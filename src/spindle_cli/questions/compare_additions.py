"""Every strategy on the cluster as it is, and with more nodes of one type or another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from rich import box
from rich.table import Table

from spindle_cli.errors import NoPlanError
from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import Profile, TaskShare
from spindle_cli.questions.additions import Aim, Wanted
from spindle_cli.questions.compare import StrategyOutcome, of_sets, outcomes_on
from spindle_cli.questions.edit import with_more_nodes
from spindle_cli.questions.spending import FIGURES, PRICE, Figure, known_figures
from spindle_cli.units import format_seconds

# What is better by less than this part is not.
BETTER = 1e-6


class ComparedCluster(Model):
    """Every strategy on some devices.

    Attributes:
        num_devices: How many devices.
        of_types: How many of each type.
        lower_bound_s: Seconds that no schedule can be shorter than; null where nothing fits.
        strategies: What each strategy does.
    """

    num_devices: int
    of_types: dict[str, int]
    lower_bound_s: float | None
    strategies: tuple[StrategyOutcome, ...]


class ComparedAddition(ComparedCluster):
    """The cluster with more devices of one type.

    Attributes:
        group: The group of nodes that they are added to, by its name or else its type.
        device: Their type.
        num_added: How many.
        num_nodes: How many nodes of the group's size these make.
        times_as_fast: Of each strategy, the iteration without them over this one; only where there are both.
        best_by: Measures by which its best strategy is better than all with nothing added, and no other
            addition's is better.
    """

    group: str
    device: str
    num_added: int
    num_nodes: int
    times_as_fast: dict[StrategyName, float]
    best_by: tuple[Aim, ...] = ()


class ComparedAdditions(Artifact):
    """The document of `spindle compare --add --json`.

    Attributes:
        workload: Name of the workload.
        cluster: Name of the cluster.
        task_sets: Where not every step runs all tasks, the sets of them that seconds are the mean of, by
            their shares.
        as_it_is: The cluster without any addition.
        additions: Each addition by itself.
    """

    KIND: ClassVar[str] = "compared-additions"

    schema_: Annotated[Literal["spindle.compared-additions/1"], Field(alias="schema")] = (
        "spindle.compared-additions/1"
    )
    workload: str
    cluster: str
    task_sets: tuple[TaskShare, ...] = ()
    as_it_is: ComparedCluster
    additions: tuple[ComparedAddition, ...]


@dataclass(frozen=True)
class _Measure:
    """What strategies are evaluated by: the less, the better. `verb`: what an iteration does of it."""

    value: Callable[[StrategyOutcome], float | None]
    verb: str

    def than(self, value: float, reference: float) -> str:
        """Says in words how a value compares with another one."""
        if self.verb == "takes":
            return f"{reference / value:.2f}x as fast as"
        return f"an iteration {self.verb} {_more(value, reference)} than"


_MEASURES: dict[Aim, _Measure] = {
    "time": _Measure(lambda row: row.iteration_s, "takes"),
    "money": _Measure(lambda row: row.cost, "costs"),
    "energy": _Measure(lambda row: row.energy_j, "draws"),
}


def _more(value: float, reference: float) -> str:
    if abs(value - reference) <= BETTER * reference:  # also where all is for nothing
        return "as much"
    return f"{value / reference - 1:.1%} more" if value > reference else f"{1 - value / reference:.1%} less"


def compare_additions(profile: Profile, cluster: Cluster, wanted: Sequence[Wanted]) -> ComparedAdditions:
    """Plan with every strategy for the cluster as it is, and for each addition alone.

    Raises:
        NoPlanError: there is a plan for none of them.
    """
    before = _on(profile, cluster)
    rows = [_added(profile, cluster, addition, before) for addition in wanted]
    every = [row for compared in (before, *rows) for row in compared.strategies]
    if all(row.iteration_s is None for row in every):
        raise NoPlanError(
            f"there is no plan for {cluster.name!r}, with none of the additions: {every[-1].failure}"
        )
    return ComparedAdditions(
        workload=profile.workload.name,
        cluster=cluster.name,
        task_sets=profile.task_sets,
        as_it_is=before,
        additions=_with_best(before, rows),
    )


def _on(profile: Profile, cluster: Cluster) -> ComparedCluster:
    outcomes = outcomes_on(profile, cluster)
    return ComparedCluster(
        num_devices=cluster.num_devices,
        of_types=dict(cluster.num_of_type),
        lower_bound_s=outcomes.lower_bound_s,
        strategies=outcomes.rows,
    )


def _added(profile: Profile, cluster: Cluster, addition: Wanted, before: ComparedCluster) -> ComparedAddition:
    group = cluster.nodes[addition.place]
    num_nodes = addition.num_added // group.devices
    after = _on(profile, with_more_nodes(cluster, addition.place, num_nodes))
    return ComparedAddition(
        **dict(after),
        group=group.label,
        device=group.device,
        num_added=addition.num_added,
        num_nodes=num_nodes,
        times_as_fast={
            new.strategy: old.iteration_s / new.iteration_s
            for old, new in zip(before.strategies, after.strategies, strict=True)
            if old.iteration_s is not None and new.iteration_s is not None
        },
    )


def _least(row: ComparedCluster, measure: _Measure) -> tuple[float, StrategyName] | None:
    """Return the least value of any strategy, of equals the first; None where there is none."""
    values = [
        (value, outcome.strategy)
        for outcome in row.strategies
        if (value := measure.value(outcome)) is not None
    ]
    return min(values, key=lambda value_and_name: value_and_name[0], default=None)


def _with_best(before: ComparedCluster, rows: Sequence[ComparedAddition]) -> tuple[ComparedAddition, ...]:
    """Say of each addition by which aims it is best; what is as good as the best is best, too."""
    best_by: list[list[Aim]] = [[] for _ in rows]
    for aim, measure in _MEASURES.items():
        values = [best[0] if (best := _least(row, measure)) else None for row in rows]
        without = _least(before, measure)
        least = min((value for value in values if value is not None), default=None)
        if least is None or (without is not None and least >= without[0] * (1 - BETTER)):
            continue
        for aims, value in zip(best_by, values, strict=True):
            aims += [aim] if value == least else []
    return tuple(
        row.model_copy(update={"best_by": tuple(aims)}) for row, aims in zip(rows, best_by, strict=True)
    )


def compared_tables(result: ComparedAdditions) -> list[Table]:
    """Make a table of seconds, and one of each figure that is known of what an iteration takes, with a row
    for each strategy and a column for each addition.
    """
    clusters = (result.as_it_is, *result.additions)
    outcomes = [row for compared in clusters for row in compared.strategies]
    title = f"{result.workload} on {result.cluster}: an iteration, with more devices"
    time = _table(result, title + of_sets(result.task_sets))
    for place, row in enumerate(result.as_it_is.strategies):
        time.add_row(row.strategy, *(_seconds(compared, place) for compared in clusters))
    tables = [time]
    for figure in known_figures(outcomes, FIGURES):
        table = _table(result, f"{figure.title} of an iteration")
        for place, row in enumerate(result.as_it_is.strategies):
            table.add_row(row.strategy, *(figure.cell(compared.strategies[place]) for compared in clusters))
        if figure is FIGURES[0]:
            table.add_row(PRICE.title, *(_price(compared, PRICE) for compared in clusters))
        tables.append(table)
    return tables


def _table(result: ComparedAdditions, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    for row in (None, *result.additions):
        table.add_column(label(row), justify="right", no_wrap=True)
    return table


def label(row: ComparedAddition | None) -> str:
    """Return what a cluster has more, as the cluster file calls it."""
    return "nothing added" if row is None else f"{row.num_added} more {row.group}"


def _seconds(compared: ComparedCluster, place: int) -> str:
    """Say an iteration's seconds, and how many times as fast that is as with nothing added."""
    row = compared.strategies[place]
    if row.iteration_s is None:
        return "no plan"
    speedup = compared.times_as_fast.get(row.strategy) if isinstance(compared, ComparedAddition) else None
    return format_seconds(row.iteration_s) + (f" ({speedup:.2f}x)" if speedup is not None else "")


def _price(compared: ComparedCluster, figure: Figure) -> str:
    """Return the price of all devices of a cluster, which any strategy's plan says."""
    return next((cell for row in compared.strategies if (cell := figure.cell(row))), "")


def best_lines(result: ComparedAdditions) -> str:
    """Return a line for each measure that is known: the additions that are best by it, against the best
    strategy with nothing added; or that none is better than that.
    """
    lines = []
    for aim, measure in _MEASURES.items():
        least_by_row = [
            (least, row) for row in result.additions if (least := _least(row, measure)) is not None
        ]
        if not least_by_row:
            continue
        (value, strategy), row = min(least_by_row, key=lambda item: item[0][0])
        without = _least(result.as_it_is, measure)
        best = [
            f"{its_strategy} with {label(addition)}"
            for (_, its_strategy), addition in least_by_row
            if aim in addition.best_by
        ]
        if without is None:
            lines.append(f"best by {aim}: {' or '.join(best)}")
            continue
        before = f"{without[1]} with nothing added"
        if best:
            lines.append(f"best by {aim}: {' or '.join(best)}: {measure.than(value, without[0])} {before}")
        else:
            lines.append(
                f"best by {aim}: {before}, as no addition is better: with the best, {strategy} with "
                f"{label(row)}, an iteration {measure.verb} {_more(value, without[0])}"
            )
    return "\n".join(lines)


def no_plan_lines(result: ComparedAdditions) -> list[str]:
    """Return a line for each strategy that has no plan, and why, with the additions of which that holds."""
    labels: dict[tuple[str, str], list[str]] = {}
    for addition in (None, *result.additions):
        for row in (result.as_it_is if addition is None else addition).strategies:
            if row.failure is not None:
                labels.setdefault((row.strategy, row.failure), []).append(label(addition))
    return [
        f"no plan by {name} with {', '.join(additions)}: {why}" for (name, why), additions in labels.items()
    ]
