"""The tables of docs/benchmarks/strategies.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from spindle_cli.files.writing import write_text
from spindle_cli.plan.types import StrategyName
from spindle_cli.units import GIB

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
# Ends the name of a random workload on devices with 40 GiB.
SMALL = "-40gib"
# What the planner is to reach: (devices from, to, mean gap, worst gap, seconds of the command).
TARGETS = ((8, 64, 0.03, 0.10, 2.0), (256, 256, 0.03, 0.08, 4.0), (1024, 1024, 0.04, 0.08, 12.0))


@dataclass(frozen=True)
class Row:
    """One plan. Seconds and bytes; `fits` is false where no plan fits the memory.

    Attributes:
        tighter_bound_s: as docs/benchmarks/strategies.md says, where it was asked for; else `lower_bound_s`.
        in_sequence_transfer_s: what transfers add with the same schedule on devices assigned in sequence.
        peak_memory_bytes, least_memory_bytes: of the fullest device, and of the emptiest.
        peak_share: operations of an iteration over what all devices could do in it at their published peak;
            None in rows that are older.
        simulated_s: the iteration by `spindle simulate`; None in rows that are older, and of more
            devices than are simulated, or random.
        planning_s: processor seconds of the whole command for `spindle`, of `make_plan` for the others.
    """

    workload: str
    num_devices: int
    strategy: StrategyName
    fits: bool
    iteration_s: float = 0.0
    compute_s: float = 0.0
    lower_bound_s: float = 1.0
    tighter_bound_s: float = 1.0
    transfer_s: float = 0.0
    in_sequence_transfer_s: float = 0.0
    gradient_sum_s: float = 0.0
    peak_memory_bytes: int = 0
    least_memory_bytes: int | None = None
    peak_share: float | None = None
    simulated_s: float | None = None
    planning_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """Compute above the whole-graph lower bound."""
        return self.compute_s / self.lower_bound_s - 1

    @property
    def in_sequence_share(self) -> float:
        """Transfers in sequence, of the iteration with them."""
        return self.in_sequence_transfer_s / (
            self.iteration_s - self.transfer_s + self.in_sequence_transfer_s
        )

    @property
    def off_simulation(self) -> float | None:
        """By which share the simulated iteration is longer than the predicted one."""
        return None if self.simulated_s is None else self.simulated_s / self.iteration_s - 1

    @property
    def tighter_gap(self) -> float:
        """Compute above the tighter bound."""
        return self.compute_s / self.tighter_bound_s - 1


def write_page(page: Path, rows: Sequence[Row]) -> None:
    """Replace what is between the page's markers."""
    put_between_markers(page, "\n\n".join(_sections(rows)))


def put_between_markers(page: Path, text: str) -> None:
    """Replace what is between a page's markers."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    write_text(page, f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def _sections(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Targets\n\n" + _targets(rows)
    yield "## Predicted iteration\n\nMilliseconds; in brackets the best of the others over `spindle`."
    yield _iterations(rows)
    yield "## Plans by `spindle`\n\n" + _plans(rows)
    yield (
        "## FLOP/s and memory\n\nFloating-point operations per second in the mean of the iteration, as a "
        "share of the devices' peak; and the most that the emptiest and the fullest device hold, GiB."
    )
    yield _work(rows)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def _targets(rows: Sequence[Row]) -> str:
    lines = []
    for first, last, mean_gap, worst_gap, seconds in TARGETS:
        plans = [r for r in rows if r.fits and r.strategy == "spindle" and first <= r.num_devices <= last]
        if not plans:
            continue
        worst = max(plans, key=lambda row: row.gap)
        lines.append(
            [
                f"{first}-{last}" if first < last else f"{first}",
                f"{mean(row.gap for row in plans):.1%} ({mean_gap:.0%})",
                f"{worst.gap:.1%} ({worst_gap:.0%})",
                f"{mean(row.tighter_gap for row in plans):.1%}",
                f"{max(row.tighter_gap for row in plans):.1%}",
                f"{max(row.planning_s for row in plans):.1f} s ({seconds:g} s)",
            ]
        )
    head = [
        "devices",
        "mean gap (target)",
        "worst gap (target)",
        "mean, tighter",
        "worst, tighter",
        "longest planning",
    ]
    return table(head, lines)


def _iterations(rows: Sequence[Row]) -> str:
    lines = []
    for key in dict.fromkeys((row.workload, row.num_devices) for row in rows):
        cell = {row.strategy: row for row in rows if (row.workload, row.num_devices) == key}
        ours = cell["spindle"]
        others = [row.iteration_s for row in cell.values() if row.fits and row.strategy != "spindle"]
        gain = f" ({min(others) / ours.iteration_s:.2f} x)" if ours.fits and others else ""
        lines.append(
            [
                f"{key[0]}, {key[1]}",
                *(_ms(cell[name]) for name in ("sequential", "distmm", "optimus")),
                _ms(ours) + gain,
            ]
        )
    return table(["workload, devices", "sequential", "distmm", "optimus", "spindle"], lines)


def _ms(row: Row) -> str:
    return f"{row.iteration_s * 1e3:.0f}" if row.fits else "no plan"


def _plans(rows: Sequence[Row]) -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "gap": lambda row: f"{row.gap:.1%}",
        "above tighter bound": lambda row: f"{row.tighter_gap:.1%}",
        "transfers": lambda row: f"{row.transfer_s / row.iteration_s:.1%}",
        "in sequence": lambda row: f"{row.in_sequence_share:.1%}",
        "gradient sums": lambda row: f"{row.gradient_sum_s / row.iteration_s:.1%}",
        "simulated": lambda row: "-" if row.off_simulation is None else f"{row.off_simulation:+.1%}",
        "best other, simulated": lambda row: _best_other_simulated(row, rows),
        "memory, GiB": lambda row: f"{row.peak_memory_bytes / GIB:.1f}",
        "planned in, s": lambda row: f"{row.planning_s:.2f}",
    }
    lines = [
        [f"{row.workload}, {row.num_devices}", *(show(row) if row.fits else "-" for show in columns.values())]
        for row in rows
        if row.strategy == "spindle"
    ]
    return table(["workload, devices", *columns], lines)


def _best_other_simulated(own: Row, rows: Sequence[Row]) -> str:
    """The simulated iteration of the best plan of another strategy, over that of `spindle`."""
    others = [
        row.simulated_s
        for row in rows
        if (row.workload, row.num_devices) == (own.workload, own.num_devices)
        and row.strategy != own.strategy
        and row.simulated_s is not None
    ]
    return "-" if not others or own.simulated_s is None else f"{min(others) / own.simulated_s:.2f} x"


def _work(rows: Sequence[Row]) -> str:
    """`spindle` beside `sequential`."""
    compared: tuple[StrategyName, ...] = ("sequential", "spindle")
    found = {(row.workload, row.num_devices, row.strategy): row for row in rows}
    lines = []
    for workload, num_devices in dict.fromkeys((row.workload, row.num_devices) for row in rows):
        own = [found[workload, num_devices, strategy] for strategy in compared]
        lines.append([f"{workload}, {num_devices}", *map(_share_of_peak, own), *map(_held, own)])
    shares, memory = ([f"{strategy}, {what}" for strategy in compared] for what in ("of the peak", "memory"))
    return table(["workload, devices", *shares, *memory], lines)


def _share_of_peak(row: Row) -> str:
    return "-" if row.peak_share is None else f"{row.peak_share:.1%}"


def _held(row: Row) -> str:
    if row.least_memory_bytes is None:
        return "-"
    return f"{row.least_memory_bytes / GIB:.1f} to {row.peak_memory_bytes / GIB:.1f}"
