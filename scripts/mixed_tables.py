"""Tables of docs/benchmarks/mixed-devices.md: what is aimed at, the paper's workloads, and random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean

from bench_tables import SMALL, table
from mixed_clusters import AT, FREE, devices_of
from random_profiles import SHAPES

from spindle_cli.plan.types import ON_SEVERAL_TYPES, StrategyName

# Compute above the bound, in the mean and at worst, of plans for so many devices.
MEAN_GAP, WORST_GAP = 0.03, 0.08
FEW, MANY = (16, 64), (768, 768)


@dataclass(frozen=True)
class Row:
    """One plan; seconds. `iteration_s`: None where no plan fits.

    Attributes:
        simulated_s: of `spindle` alone, and not of random workloads.
        tighter_s: the bound of patterns, where it has been worked out.
        planning_s: processor seconds of planning.
    """

    workload: str
    cluster: str
    strategy: StrategyName
    iteration_s: float | None
    compute_s: float = 0.0
    lower_bound_s: float = 0.0
    simulated_s: float | None = None
    planning_s: float = 0.0
    notes: tuple[str, ...] = field(default=())
    tighter_s: float | None = None

    @property
    def gap(self) -> float:
        """Compute above the bound."""
        return self.compute_s / self.lower_bound_s - 1

    @property
    def tighter_gap(self) -> float:
        """Compute above the higher one of both bounds."""
        return self.compute_s / max(self.lower_bound_s, self.tighter_s or 0.0) - 1

    @property
    def is_random(self) -> bool:
        """Whether it is of a random workload."""
        return self.workload.split("-")[0] in SHAPES

    @property
    def is_slow(self) -> bool:
        """Whether links between nodes are slower than those that such clusters have."""
        return AT in self.cluster

    @property
    def is_free(self) -> bool:
        """Whether links take no time."""
        return self.cluster.endswith(FREE)


@dataclass(frozen=True)
class Target:
    """A class of plans and what is aimed at. `planning_s`: None where nothing is."""

    name: str
    num_types: int
    devices: tuple[int, int]
    picks: Callable[[Row], bool]
    planning_s: float | None

    def plans(self, rows: Sequence[Row]) -> list[Row]:
        """Those of the class, by `spindle`."""
        return [row for row in rows if row.strategy == "spindle" and self._has(row)]

    def _has(self, row: Row) -> bool:
        if row.is_slow:
            return False
        counts = devices_of(row.cluster)
        first, last = self.devices
        return len(counts) == self.num_types and first <= sum(counts.values()) <= last and self.picks(row)


def _paper(row: Row) -> bool:
    return not row.is_random


def _random(row: Row) -> bool:
    return row.is_random and not row.workload.endswith(SMALL) and not row.is_free


def _free(row: Row) -> bool:
    return row.is_random and row.is_free


def _small(row: Row) -> bool:
    return row.is_random and row.workload.endswith(SMALL)


TARGETS = (
    Target("two types, the paper's", 2, FEW, _paper, 3.0),
    Target("two types, random", 2, FEW, _random, 3.0),
    Target("two types, random, links that take no time", 2, FEW, _free, 3.0),
    Target("two types, random, 40 GiB", 2, FEW, _small, 3.0),
    Target("three types, the paper's", 3, FEW, _paper, None),
    Target("three types, random", 3, FEW, _random, None),
    Target("three types, random, 40 GiB", 3, FEW, _small, None),
    Target("three types x 256, random", 3, MANY, _random, 20.0),
)


def sections(rows: Sequence[Row]) -> Iterator[str]:
    """What is between the page's markers."""
    yield targets_table(rows)
    yield "The paper's workloads:"
    yield _plans([row for row in rows if not row.is_random and not row.is_slow])
    slow = [row for row in rows if row.is_slow]
    if slow:
        yield "The paper's workloads behind slow links, of so many GB/s between nodes:"
        yield _plans(slow)
    drawn = [row for row in rows if row.is_random and not row.is_free]
    if drawn:
        yield "Random workloads:"
        yield _plans(drawn)
    free = [row for row in rows if row.is_free]
    if free:
        yield "Random workloads on links that take no time:"
        yield _plans(free)


def targets_table(rows: Sequence[Row]) -> str:
    """Of each class that has plans, how far they are from what is aimed at."""
    lines = []
    for target in TARGETS:
        plans = target.plans(rows)
        gaps = [row.gap for row in plans if row.iteration_s is not None]
        if not gaps:
            continue
        longest_s = max(row.planning_s for row in plans)
        aims = (f" ({MEAN_GAP:.0%})", f" ({WORST_GAP:.0%})") if target.devices == FEW else ("", "")
        in_s = "" if target.planning_s is None else f" ({target.planning_s:g} s)"
        lines.append(
            [
                target.name,
                str(len(gaps)) if len(gaps) == len(plans) else f"{len(gaps)} of {len(plans)}",
                f"{mean(gaps):.1%}{aims[0]}",
                f"{max(gaps):.1%}{aims[1]}",
                *_tighter(plans),
                f"{longest_s:.1f} s{in_s}",
            ]
        )
    head = ["types, workloads", "plans", "mean gap (target)", "worst gap (target)"]
    return table([*head, "mean, tighter", "worst, tighter", "longest planning"], lines)


def _tighter(plans: Sequence[Row]) -> tuple[str, str]:
    """Mean and worst above the tighter bound, where it has been worked out for any."""
    gaps = [row.tighter_gap for row in plans if row.iteration_s is not None]
    if all(row.tighter_s is None for row in plans):
        return "", ""
    return f"{mean(gaps):.1%}", f"{max(gaps):.1%}"


def worst_of_each(rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """Of each class that has plans the one that is furthest above the bound."""
    for target in TARGETS:
        plans = [row for row in target.plans(rows) if row.iteration_s is not None]
        if plans:
            yield target.name, max(plans, key=lambda row: row.gap)


def _plans(rows: Sequence[Row]) -> str:
    lines = []
    for key in dict.fromkeys((row.workload, row.cluster) for row in rows):
        own = {row.strategy: row for row in rows if (row.workload, row.cluster) == key}
        iterations = [_ms(own[name]) if name in own else "" for name in ON_SEVERAL_TYPES]
        lines.append([", ".join(key), *iterations, *_of_spindle(own["spindle"])])
    head = [
        "workload, cluster",
        *ON_SEVERAL_TYPES,
        "above the bound",
        "above the tighter bound",
        "simulated",
        "planned in, s",
    ]
    return table(head, lines)


def _of_spindle(row: Row) -> list[str]:
    if row.iteration_s is None:
        return ["-", "-", "-", "-"]
    off = "" if row.simulated_s is None else f"{row.simulated_s / row.iteration_s - 1:+.1%}"
    tighter = "" if row.tighter_s is None else f"{row.tighter_gap:.1%}"
    return [f"{row.gap:.1%}", tighter, off, f"{row.planning_s:.1f}"]


def _ms(row: Row) -> str:
    return "no plan" if row.iteration_s is None else f"{row.iteration_s * 1e3:.0f}"
