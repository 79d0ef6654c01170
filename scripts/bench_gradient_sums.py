"""Dense sums against rows and factors: two hosts with a slow link train a model by plans that differ in it.

    python scripts/bench_gradient_sums.py [--speed MBIT] [--rounds N] [--steps N]

As root, with iproute2. The hosts are network namespaces with a core each. The model is nearly all embedding
and one wide layer (`runtime_bench/wide_words.py`), on both hosts by the `sequential` strategy. The plans
alternate; medians over all steps behind each run's first two, beside what the plans predict.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

import yaml
from runtime_bench.contestants import Job, planned
from runtime_bench.errors import BenchError
from runtime_bench.hosts import require_tools, shape, two_hosts
from runtime_bench.measured_cluster import measured_cluster

import spindle_cli
from spindle_cli.plan.types import Sums
from spindle_cli.units import MIB

WAYS: tuple[Sums, ...] = ("dense", "rows", "factors", "auto")
_MODEL = Path(__file__).parent / "runtime_bench" / "wide_words.py"


def run(mbit_per_s: int, rounds: int, num_steps: int, folder: Path) -> None:
    """Profile, plan each way, train in turns, print."""
    workload = folder / "wide-words.yaml"
    settings = {"optimizer": "AdamW", "lr": 1e-3, "steps": num_steps, "seed": 0}
    content = {"schema": "spindle.workload/1", "model": f"{_MODEL}:build", "train": settings}
    workload.write_text(yaml.safe_dump(content), encoding="utf-8")
    taken: dict[Sums, list[float]] = {way: [] for way in WAYS}
    with two_hosts() as hosts:
        shape(hosts, mbit_per_s)
        cluster = measured_cluster(hosts, mbit_per_s, folder)
        profile = spindle_cli.profile(workload, cluster=cluster, accept_noise=True)
        paths = {way: folder / f"{way}.yaml" for way in WAYS}
        plans = {
            way: spindle_cli.plan(profile, cluster, path, strategy="sequential", sums=way)
            for way, path in paths.items()
        }
        for _ in range(rounds):
            for way in WAYS:
                job = Job(hosts, workload, num_steps, folder)
                taken[way] += planned(paths[way])(job).iterations_s
    print(f"{'sums':8} {'predicted':>10} {'measured':>10} {'of dense':>9} {'memory':>10}")
    for way, plan in plans.items():
        measured_s = median(taken[way])
        share = measured_s / median(taken["dense"])
        memory = max(plan.predicted.peak_memory_bytes) / MIB
        print(
            f"{way:8} {plan.predicted.iteration_s * 1e3:7.1f} ms {measured_s * 1e3:7.1f} ms {share:9.2f} "
            f"{memory:6.1f} MiB"
        )


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speed", type=int, default=200, metavar="MBIT", help="Mbit/s of the link")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each plan")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    asked = parser.parse_args()
    try:
        require_tools()
        with tempfile.TemporaryDirectory() as folder:
            run(asked.speed, asked.rounds, asked.steps, Path(folder))
    except BenchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
