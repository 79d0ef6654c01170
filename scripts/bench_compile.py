"""Compare the iterations of a workload of the zoo with plain and with compiled layers, by one plan.

    python scripts/bench_compile.py [WORKLOAD.yaml] [--cluster CLUSTER.yaml] [--rounds N] [--steps N]

Both run by the same plan. The first compiled run of a machine fills inductor's cache and is not counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles

import yaml

from spindle_cli.files.run_files import read_metrics
from spindle_cli.units import format_seconds

ROOT = Path(__file__).parent.parent
LEFT_OUT = 3  # steps at the beginning of each run


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", type=Path, nargs="?", default=ROOT / "configs/workloads/digits.yaml")
    parser.add_argument("--cluster", type=Path, default=ROOT / "configs/clusters/cpu-2.yaml")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = write_sources(asked.workload, folder)
        plan = folder / "plan.yaml"
        profile = folder / "profile.json"
        spindle("profile", sources["plain"], "--estimate", "--cluster", asked.cluster, "-o", profile)
        spindle("plan", profile, "--cluster", asked.cluster, "-o", plan, "--strategy", "sequential")
        train(plan, sources["compiled"], folder / "first", LEFT_OUT)
        times_s: dict[str, list[float]] = {way: [] for way in sources}
        for number in range(asked.rounds):
            for way, source in sources.items():
                times_s[way] += train(plan, source, folder / f"{way}-{number}", asked.steps)
    for way, found in times_s.items():
        first, _, third = (format_seconds(each) for each in quantiles(found, n=4))
        print(f"{way:9} {format_seconds(median(found))} ({first} to {third}), {len(found)} steps")
    print(f"compiled / plain: {median(times_s['compiled']) / median(times_s['plain']):.2f}")


def write_sources(workload: Path, folder: Path) -> dict[str, Path]:
    """The workload file as it is, and with compiled layers."""
    content = yaml.safe_load(workload.read_text())
    sources = {"plain": folder / "plain.yaml", "compiled": folder / "compiled.yaml"}
    for way, path in sources.items():
        train = {**content.get("train", {}), "compile": way == "compiled"}
        path.write_text(yaml.safe_dump({**content, "train": train}))
    return sources


def train(plan: Path, source: Path, run_dir: Path, steps: int) -> list[float]:
    """Seconds of each step but the first ones."""
    spindle("launch", plan, "--workload", source, "--steps", steps, "--run-dir", run_dir)
    return [line.iteration_s for line in read_metrics(run_dir)][LEFT_OUT:]


def spindle(*arguments: object) -> None:
    """Run a command; its messages are shown if it fails."""
    command = [sys.executable, "-m", "spindle_cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")


if __name__ == "__main__":
    main()
