"""Predicted and simulated iterations against real runs on this machine's CPU, one worker per core.

    python scripts/bench_predictions.py [--steps N]

Profiles, plans, simulates and trains each workload on two devices, by two strategies in turn, and puts the
table into docs/benchmarks/simulate.md between its markers. Needs two cores with nothing else to do.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from bench_tables import put_between_markers
from paper_profiles import ROOT

from spindle_cli.files.run_files import PREDICTED_FILE, PredictedVsMeasured
from spindle_cli.plan.file import read_plan
from spindle_cli.process.devices import cpu_model
from spindle_cli.simulate.run import simulate
from spindle_cli.units import format_seconds

WORKLOADS = ("digits", "clip-4-laptop", "clip-10-laptop", "ofasys-4-laptop")
STRATEGIES = ("spindle", "sequential")
CLUSTER = ROOT / "configs" / "clusters" / "cpu-2.yaml"
PAGE = ROOT / "docs" / "benchmarks" / "simulate.md"


@dataclass(frozen=True)
class Row:
    """Seconds of an iteration as simulated and as measured; `compute`: of the busiest device."""

    workload: str
    strategy: str
    simulated_s: float
    measured_s: float
    predicted_compute_s: float
    measured_compute_s: float


def main() -> None:
    """Run everything and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for workload in WORKLOADS for row in measured_rows(workload, Path(folder), steps)]
    text = "\n".join(table(rows, steps))
    put_between_markers(PAGE, text)
    print(text)


def measured_rows(workload: str, folder: Path, steps: int) -> Iterator[Row]:
    """A workload under every strategy."""
    profile = folder / f"{workload}.json"
    source = ROOT / "configs" / "workloads" / f"{workload}.yaml"
    spindle("profile", source, "-o", profile, "--cluster", CLUSTER, "--nproc", "2")
    for strategy in STRATEGIES:
        plan_path, run_dir = folder / f"{workload}-{strategy}.yaml", folder / f"{workload}-{strategy}"
        spindle("plan", profile, "--cluster", CLUSTER, "-o", plan_path, "--strategy", strategy)
        spindle("launch", plan_path, "--run-dir", run_dir, "--steps", str(steps))
        plan = read_plan(plan_path)
        run = PredictedVsMeasured.read(run_dir / PREDICTED_FILE)
        simulation = simulate(plan)
        computes = [0.0] * plan.cluster.num_devices
        for span in simulation.spans:
            computes[span.device] += span.end_s - span.start_s
        yield Row(
            workload=workload,
            strategy=strategy,
            simulated_s=simulation.iteration_s,
            measured_s=run.iteration.measured_s,
            predicted_compute_s=max(computes),
            measured_compute_s=max(device.compute_s for device in run.devices),
        )


def spindle(*arguments: str | Path) -> None:
    """Run a command of the `spindle` command line; exits with its code if it fails."""
    command = [sys.executable, "-m", "spindle_cli", *map(str, arguments)]
    code = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL).returncode
    if code:
        sys.exit(code)


def table(rows: Sequence[Row], steps: int) -> Iterator[str]:
    """The rows as Markdown."""
    yield f"`make bench-predictions`, {steps} steps each, {date.today()}, {cpu_model()}, 2 cores, no GPU."
    yield ""
    parts = ("compute", "iteration")
    heads = " | ".join(f"{part}, simulated | measured | off by" for part in parts)
    yield f"| workload | strategy | {heads} |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        cells = (
            row.workload,
            row.strategy,
            format_seconds(row.predicted_compute_s),
            format_seconds(row.measured_compute_s),
            f"{row.predicted_compute_s / row.measured_compute_s - 1:+.0%}",
            format_seconds(row.simulated_s),
            format_seconds(row.measured_s),
            f"{row.simulated_s / row.measured_s - 1:+.0%}",
        )
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
