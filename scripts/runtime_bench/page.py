"""Results of the runtime's benchmark as JSON and as a page of tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from pydantic import BaseModel

from runtime_bench.contestants import Run

JSON_FILE, PAGE_FILE = "two-hosts.json", "two-hosts.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

NAMES = {
    "ddp": "DDP, task after task",
    "fsdp2": "FSDP2, task after task",
    "sequential": "`sequential` plan",
    "spindle": "`spindle` plan",
    "hand": "pipeline written by hand",
}


class Result(BaseModel):
    """A contestant: medians over all steps of all its runs, warm-up left out, and of its runs (`rounds_s`).

    `outside`: see `Run`, median of the runs. `worst_loss_difference`: of any task's loss of any step from
    DDP's, as a share.
    """

    iteration_s: float
    rounds_s: list[float]
    predicted_s: float | None
    outside: float | None
    worst_loss_difference: float


class Trial(BaseModel):
    """Contestants that took turns on one workload and link."""

    name: str
    where: str
    results: dict[str, Result]

    @classmethod
    def of(
        cls, name: str, where: str, runs: Mapping[str, Sequence[Run]], predicted: Mapping[str, float]
    ) -> Trial:
        """From the runs by contestant, DDP's among them, and what plans predict."""
        results = {
            contestant: Result(
                iteration_s=median(seconds for run in own for seconds in run.iterations_s),
                rounds_s=[median(run.iterations_s) for run in own],
                predicted_s=predicted.get(contestant),
                outside=median(shares)
                if (shares := [r.outside for r in own if r.outside is not None])
                else None,
                worst_loss_difference=max(loss_difference(run, runs["ddp"][0]) for run in own),
            )
            for contestant, own in runs.items()
        }
        return cls(name=name, where=where, results=results)

    def lines(self) -> Iterator[str]:
        """The table, as Markdown."""
        ddp_s = self.results["ddp"].iteration_s
        yield f"**{self.name}**, {self.where}:"
        yield ""
        yield "| | iteration | of DDP's | runs | predicted | off by | outside | losses differ by |"
        yield "|---|---:|---:|---|---:|---:|---:|---:|"
        for contestant, result in self.results.items():
            off = None if result.predicted_s is None else result.iteration_s / result.predicted_s - 1
            cells = (
                NAMES[contestant],
                f"{result.iteration_s * 1e3:.0f} ms",
                f"{result.iteration_s / ddp_s:.3f}",
                ", ".join(f"{seconds * 1e3:.0f}" for seconds in result.rounds_s),
                "" if result.predicted_s is None else f"{result.predicted_s * 1e3:.0f} ms",
                "" if off is None else f"{off:+.1%}",
                "" if result.outside is None else f"{result.outside:.1%}",
                f"{result.worst_loss_difference:.0e}",
            )
            yield "| " + " | ".join(cells) + " |"
        yield ""


class Outcome(BaseModel):
    """All trials by name, in the order in which they are shown."""

    trials: dict[str, Trial]

    def updated(self, newer: Outcome) -> Outcome:
        """With the newer results in the places of the older."""
        return Outcome(trials={**self.trials, **newer.trials})


def loss_difference(run: Run, reference: Run) -> float:
    """The largest difference of any task's loss at any step, as a share of the reference's."""
    return max(
        abs(loss - expected[task]) / abs(expected[task])
        for losses, expected in zip(run.losses, reference.losses, strict=True)
        for task, loss in losses.items()
    )


def here_and_now() -> str:
    """Machine and date of a measurement."""
    cores = len(os.sched_getaffinity(0))
    today = datetime.now(tz=UTC).date().isoformat()
    return f"{cores} cores ({platform.machine()}), no GPU, torch {torch.__version__}, {today}"


def read_outcome(docs: Path) -> Outcome:
    """What was measured before; nothing if nothing was."""
    path = docs / JSON_FILE
    if not path.exists():
        return Outcome(trials={})
    return Outcome.model_validate_json(path.read_text(encoding="utf-8"))


def write_outcome(docs: Path, outcome: Outcome) -> None:
    """The JSON, and the tables between the page's markers."""
    (docs / JSON_FILE).write_text(outcome.model_dump_json(indent=1) + "\n", encoding="utf-8")
    page = docs / PAGE_FILE
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n".join(line for trial in outcome.trials.values() for line in trial.lines())
    page.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}", encoding="utf-8")
