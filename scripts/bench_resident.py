"""Resident memory of workers that share out a model, against what the account says that they take.

    python scripts/bench_resident.py [--devices N] [--workloads NAME ...] [--variants NAME ...] [--steps N]

Trains in N processes of this machine and reads how much their resident memory grows at most (Linux), from
when they have joined each other: what torch and Python take before is not counted, nor are files that are
mapped (libraries' code, which processes share); everything else is.
Profiles are estimated, so sizes are exact and times are not. Prints a table.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench_memory import ROOT, torchrun
from bench_start import WORKLOADS, roomy
from memory_bench.variants import VARIANTS, Estimates, plan_variant, write_run, write_variant

from spindle_cli.files.cluster import Cluster
from spindle_cli.units import MIB

NAMES = ("parameters shared out",)
COLUMNS = ("workload", "devices", "variant", "predicted, MiB", "until a step could begin", "in training")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=4, metavar="N")
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=("llama-300m",),
        choices=sorted(path.stem for path in WORKLOADS.glob("*.yaml")),
        metavar="NAME",
    )
    parser.add_argument("--variants", nargs="+", default=NAMES, choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=2, metavar="N")
    asked = parser.parse_args()
    print(f"| {' | '.join((*COLUMNS, 'measured / predicted'))} |")
    print("|" + "---|" * (len(COLUMNS) + 1))
    with tempfile.TemporaryDirectory() as folder:
        for workload in asked.workloads:
            for name in asked.variants:
                to = Path(folder) / f"{workload}-{name.replace(' ', '-')}"
                print(line(workload, name, asked.devices, asked.steps, to), flush=True)


def line(workload: str, name: str, count: int, steps: int, folder: Path) -> str:
    """A row of the table: of the rank that takes most of what is said of it."""
    folder.mkdir()
    cluster = roomy(Cluster.read(ROOT / "configs" / "clusters" / f"cpu-{count}.yaml"))
    source = write_variant(WORKLOADS / f"{workload}.yaml", VARIANTS[name], folder)
    profile = Estimates(cluster, folder).of(source, VARIANTS[name])
    plan = plan_variant(profile, VARIANTS[name], cluster, "sequential", folder)
    assert plan is not None, "these variants can be planned for any workload"
    write_run(plan, source, folder / "runs" / "run", steps)
    torchrun(count, str(folder / "runs"), module="memory_bench.resident")
    found = []
    for rank, predicted in enumerate(plan.predicted.peak_memory_bytes):
        start, *training = (
            int(text) for text in (folder / "runs" / "run" / f"resident.{rank}").read_text().split()
        )
        found.append((max(start, *training) / predicted, predicted, start, max(training)))
    ratio, *sizes = max(found)
    cells = (workload, str(count), name, *(f"{size / MIB:.0f}" for size in sizes), f"{ratio:.3f}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
