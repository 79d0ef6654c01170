"""Results of the benchmark of two unequal hosts, as JSON and as tables in the page on mixed devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from pydantic import BaseModel

from runtime_bench.contestants import Run
from runtime_bench.page import loss_difference

JSON_FILE, PAGE_FILE = "unequal-hosts.json", "mixed-devices.md"
BEGIN, END = "<!-- runs: begin -->", "<!-- runs: end -->"
FAST, SLOW = "cpu-fast", "cpu-slow"
PLANS = ("dp-even", "dp-flops", "spindle")
BASELINES = ("ddp", "dp-even", "dp-flops")
NAMES = {"ddp": "DDP", "dp-even": "`dp-even`", "dp-flops": "`dp-flops`", "spindle": "`spindle`"}
# Targets: of the prediction, of the gain that even shares leave at best, and against the best baseline.
OFF_BY, OF_GAIN, NO_SLOWER = 0.10, 0.9, 1.0
# Compute rules where a plan's prediction is so much of it.
COMPUTE_RULES = 0.9


class Result(BaseModel):
    """A contestant: medians over all steps of all its runs, warm-up left out, and of its runs (`rounds_s`).

    `predicted_s`, `compute_s`: an iteration by its plan, and the schedule alone. `speeds`: by type of device,
    of the profile's, median of the runs. `worst_loss_difference`: of any task's loss of any step from that of
    `dp-even`, as a share.
    """

    iteration_s: float
    rounds_s: list[float]
    predicted_s: float | None = None
    compute_s: float | None = None
    speeds: dict[str, float] = {}
    worst_loss_difference: float

    @property
    def off_by(self) -> float | None:
        """Measured over predicted, less 1."""
        return None if self.predicted_s is None else self.iteration_s / self.predicted_s - 1


class Trial(BaseModel):
    """Contestants that took turns. `ratio`: the slow host's speed as a share of the other's."""

    workload: str
    ratio: float
    mbit_per_s: int
    where: str
    results: dict[str, Result]

    @classmethod
    def of(
        cls,
        place: tuple[str, float, int],
        where: str,
        runs: Mapping[str, Sequence[Run]],
        predicted: Mapping[str, tuple[float, float]],
    ) -> Trial:
        """From the runs by contestant, `dp-even`'s among them.

        Args:
            place: workload, ratio, Mbit/s.
            predicted: of each plan, an iteration and the schedule alone.
        """
        results = {}
        for name, own in runs.items():
            iteration_s, compute_s = predicted.get(name, (None, None))
            results[name] = Result(
                iteration_s=median(seconds for run in own for seconds in run.iterations_s),
                rounds_s=[median(run.iterations_s) for run in own],
                predicted_s=iteration_s,
                compute_s=compute_s,
                speeds={kind: median(run.speeds[kind] for run in own) for kind in own[0].speeds},
                worst_loss_difference=max(loss_difference(run, runs["dp-even"][0]) for run in own),
            )
        workload, ratio, mbit_per_s = place
        return cls(workload=workload, ratio=ratio, mbit_per_s=mbit_per_s, where=where, results=results)

    @property
    def name(self) -> str:
        """What tells it from others."""
        return f"{self.workload}, r = {self.ratio:g}, {self.mbit_per_s} Mbit/s"

    @property
    def gain(self) -> float:
        """Over even shares."""
        return self.results["dp-even"].iteration_s / self.results["spindle"].iteration_s

    @property
    def best_gain(self) -> float:
        """Over even shares at most, where nothing but compute counts: these take 1 / r where a fast device
        takes 1, and both together 2 / (1 + r).
        """
        return (1 + self.ratio) / (2 * self.ratio)

    @property
    def compute_rules(self) -> bool:
        """Whether even shares are predicted to take about as long as they compute."""
        even = self.results["dp-even"]
        assert even.compute_s is not None and even.predicted_s is not None, "it is a plan"
        return even.compute_s >= COMPUTE_RULES * even.predicted_s

    def misses(self) -> Iterator[str]:
        """Targets that are not met, for people."""
        spindle = self.results["spindle"]
        if spindle.off_by is not None and abs(spindle.off_by) > OFF_BY:
            yield f"off its prediction by {spindle.off_by:+.1%}"
        if self.compute_rules and self.gain < OF_GAIN * self.best_gain:
            yield f"{self.gain:.2f} times as fast as even shares, not {OF_GAIN * self.best_gain:.2f}"
        best = min((each for each in BASELINES if each in self.results), key=self._seconds)
        times = spindle.iteration_s / self._seconds(best)
        if times > NO_SLOWER:
            yield f"{times:.3f} times as long as {NAMES[best]}"

    def _seconds(self, name: str) -> float:
        return self.results[name].iteration_s

    def lines(self) -> Iterator[str]:
        """The table, as Markdown."""
        yield f"**{self.name}**, {self.where}:"
        yield ""
        yield "| | iteration | runs | predicted | off by | speed: fast, slow | losses differ by |"
        yield "|---|---:|---|---:|---:|---:|---:|"
        for name, result in self.results.items():
            speeds = [f"{result.speeds[kind]:.0%}" for kind in (FAST, SLOW) if kind in result.speeds]
            cells = (
                NAMES[name],
                f"{result.iteration_s * 1e3:.0f} ms",
                ", ".join(f"{seconds * 1e3:.0f}" for seconds in result.rounds_s),
                "" if result.predicted_s is None else f"{result.predicted_s * 1e3:.0f} ms",
                "" if result.off_by is None else f"{result.off_by:+.1%}",
                ", ".join(speeds),
                f"{result.worst_loss_difference:.0e}",
            )
            yield "| " + " | ".join(cells) + " |"
        yield ""
        rules = "compute rules" if self.compute_rules else "compute does not rule"
        best = f"{rules}; at best {self.best_gain:.2f}"
        gain = f"`spindle` is {self.gain:.2f} times as fast as even shares ({best})"
        missed = "; ".join(self.misses())
        yield f"{gain}. {'Missed: ' + missed + '.' if missed else 'All targets met.'}"
        yield ""


class Outcome(BaseModel):
    """All trials by name, in the order in which they are shown."""

    trials: dict[str, Trial] = {}


def read_outcome(docs: Path) -> Outcome:
    """What was measured before; nothing if nothing was."""
    path = docs / JSON_FILE
    return Outcome.model_validate_json(path.read_text(encoding="utf-8")) if path.exists() else Outcome()


def write_outcome(docs: Path, newer: Outcome) -> None:
    """The JSON, and the tables between the page's markers; newer trials in the places of older ones."""
    trials = {**read_outcome(docs).trials, **newer.trials}
    (docs / JSON_FILE).write_text(Outcome(trials=trials).model_dump_json(indent=1) + "\n", encoding="utf-8")
    page = docs / PAGE_FILE
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n".join(line for trial in trials.values() for line in trial.lines())
    page.write_text(f"{before}{BEGIN}\n\n{tables}\n{END}{after}", encoding="utf-8")
