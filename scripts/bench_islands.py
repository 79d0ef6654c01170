"""Islands against sums in every step: two hosts with a slow link train a model as one, and as an island each.

    python scripts/bench_islands.py [--speed MBIT] [--every K] [--rounds N] [--steps N]

As root, with iproute2. The hosts are network namespaces with a core each. The ways alternate; means over all
steps behind each run's first `--every`, beside what the plans predict, and the last losses.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import yaml
from runtime_bench.contestants import Job, planned
from runtime_bench.errors import BenchError
from runtime_bench.hosts import require_tools, shape, two_hosts
from runtime_bench.measured_cluster import measured_cluster

import spindle_cli
from spindle_cli.units import MIB

# One task: both hosts take part in it, and sum all of its gradients, unless they are islands.
_MODEL = {"model": "spindle_cli.zoo.senses:build", "args": {"tasks": 1}}


def ways(every: int) -> dict[str, dict[str, object]]:
    """By name, train settings."""
    islands: dict[str, dict[str, object]] = {
        f"islands, {bits} bits": {"local_sgd": {"islands": 2, "every": every, "bits": bits}}
        for bits in (32, 8)
    }
    return {"one model": {}, **islands}


def workload_in(folder: Path, name: str, settings: Mapping[str, object], num_steps: int) -> Path:
    """A workload file of its own."""
    path = folder / f"{name.replace(', ', '-').replace(' ', '-')}.yaml"
    train = {"optimizer": "AdamW", "lr": 1e-3, "steps": num_steps, "seed": 0, **settings}
    content = {"schema": "spindle.workload/1", **_MODEL, "train": train}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def run(mbit_per_s: int, every: int, rounds: int, num_steps: int, folder: Path) -> None:
    """Profile and plan each way, train in turns, print."""
    asked = ways(every)
    files = {name: workload_in(folder, name, settings, num_steps) for name, settings in asked.items()}
    taken: dict[str, list[float]] = {name: [] for name in asked}
    with two_hosts() as hosts:
        shape(hosts, mbit_per_s)
        cluster = measured_cluster(hosts, mbit_per_s, folder)
        paths = {name: path.with_suffix(".plan.yaml") for name, path in files.items()}
        plans = {}
        for name, path in files.items():
            profile = spindle_cli.profile(path, cluster=cluster, accept_noise=True)
            plans[name] = spindle_cli.plan(profile, cluster, paths[name], sums="dense")
        for _ in range(rounds):
            for name, path in files.items():
                job = Job(hosts, path, num_steps, folder)
                taken[name] += planned(paths[name])(job).iterations_s[every - 2 :]
    print(f"{'':18} {'predicted':>10} {'measured':>10} {'sent a step':>12}")
    for name, plan in plans.items():
        islands = plan.islands
        sent = sum(islands.outer_step_bytes) / every if islands is not None else float("nan")
        print(
            f"{name:18} {plan.mean_iteration_s * 1e3:7.1f} ms {fmean(taken[name]) * 1e3:7.1f} ms "
            f"{sent / MIB:8.2f} MiB"
        )


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speed", type=int, default=200, metavar="MBIT", help="Mbit/s of the link")
    parser.add_argument("--every", type=int, default=8, help="steps from one outer step to the next")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way")
    parser.add_argument("--steps", type=int, default=24, help="steps of each run, a multiple of --every")
    asked = parser.parse_args()
    try:
        require_tools()
        with tempfile.TemporaryDirectory() as folder:
            run(asked.speed, asked.every, asked.rounds, asked.steps, Path(folder))
    except BenchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
