"""What `spindle compare` and `spindle sweep` answer: the document, its tables, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from spindle_cli.files.artifact import Artifact
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.types import StrategyName
from spindle_cli.profile.types import Profile
from spindle_cli.questions.additions import added, additions, additions_table, best_lines, parse_additions
from spindle_cli.questions.compare import compare, comparison_table, spending_table
from spindle_cli.questions.compare_additions import best_lines as best_of_compared
from spindle_cli.questions.compare_additions import compare_additions, compared_tables, no_plan_lines
from spindle_cli.questions.edit import edited
from spindle_cli.questions.spending import unknown
from spindle_cli.questions.sweep import default_counts, parse_counts, sweep, sweep_table


@dataclass(frozen=True)
class Answer:
    """An answer as a document, as what is printed of it, and with notes for people."""

    document: Artifact
    printed: tuple[RenderableType, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """The tasks and the cluster that are asked about.

    Attributes:
        without: tasks that are left out.
        batches: other batch sizes, each as 'task=size'.
        add: kinds of devices to add, each by itself, as the options have them; none: the cluster as it is.
    """

    profile: Profile
    cluster: Cluster
    without: Sequence[str]
    batches: Sequence[str]
    add: Sequence[str]

    def compare(self) -> Answer:
        """Answer what every strategy makes of it.

        Raises:
            UsageError: an option does not fit the profile or the cluster.
        """
        profile = edited(self.profile, self.without, self.batches)
        if self.add:
            wanted = parse_additions(self.add, profile, self.cluster)
            compared = compare_additions(profile, self.cluster, wanted)
            notes = (*no_plan_lines(compared), *unknown(self.cluster, wanted=True))
            return Answer(compared, (*compared_tables(compared), best_of_compared(compared)), notes)
        comparison = compare(profile, self.cluster)
        spending = spending_table(comparison)
        tables = (comparison_table(comparison), *([] if spending is None else [spending]))
        of_strategies = (
            f"{row.strategy}: {note}"
            for row in comparison.strategies
            for note in (*row.notes, *([row.failure] if row.failure else []))
        )
        return Answer(comparison, tables, (*of_strategies, *unknown(self.cluster)))

    def sweep(self, devices: str | None, strategy: StrategyName, price: float | None) -> Answer:
        """Answer what one strategy makes of several numbers of devices, or of each addition.

        Args:
            devices: the numbers, as the option has them; None: the usual ones.
            price: of a device for an hour.

        Raises:
            UsageError: an option does not fit the profile or the cluster.
        """
        profile = edited(self.profile, self.without, self.batches)
        if self.add:
            wanted = parse_additions(self.add, profile, self.cluster)
            result = additions(profile, self.cluster, wanted, strategy, price)
            without_plan = (
                f"no plan with {added(row)} added: {row.failure}"
                for row in (result.as_it_is, *result.additions)
                if row.failure is not None
            )
            notes = (*without_plan, *unknown(self.cluster, price, wanted=True))
            return Answer(result, (additions_table(result), best_lines(result)), notes)
        counts = default_counts(self.cluster) if devices is None else parse_counts(devices)
        swept = sweep(profile, self.cluster, counts, strategy, price)
        return Answer(swept, (sweep_table(swept),), tuple(unknown(self.cluster, price)))
