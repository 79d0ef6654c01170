"""One update of all parameters against updates part by part: two hosts with a slow link train the same model.

    python scripts/bench_updates.py [--speeds MBIT ...] [--workloads NAME ...] [--optimizer NAME]
        [--rounds N] [--steps N]

As root, with iproute2. The hosts are network namespaces with a core each. Both hold all parameters and all of
their optimizer state (`shard_optimizer: false`), by the `sequential` strategy; the plans differ in
`updates_by_parts` alone. They alternate; medians over all steps behind each run's first two.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median

import yaml
from runtime_bench.contestants import Job, planned
from runtime_bench.errors import BenchError
from runtime_bench.hosts import Host, require_tools, shape, two_hosts
from runtime_bench.measured_cluster import measured_cluster

import spindle_cli
from spindle_cli.profile.types import Profile

WORKLOADS = ("senses-6",)
_CONFIGS = Path(__file__).parent.parent / "configs" / "workloads"
_WIDE_WORDS = Path(__file__).parent / "runtime_bench" / "wide_words.py"
_WAYS = {"at once": False, "by parts": True}


def write_workload(name: str, optimizer: str, num_steps: int, folder: Path) -> Path:
    """A workload file in the folder, trained with whole optimizer state on each host."""
    content = {"schema": "spindle.workload/1", "model": f"{_WIDE_WORDS}:build"}
    if name != "wide-words":
        content = yaml.safe_load((_CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    settings = {"optimizer": optimizer, "lr": 1e-3, "steps": num_steps, "seed": 0, "shard_optimizer": False}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**content, "train": settings}), encoding="utf-8")
    return path


def compare(
    hosts: tuple[Host, Host],
    name: str,
    profile: Profile,
    mbit_per_s: int,
    rounds: int,
    num_steps: int,
    out: Path,
) -> None:
    """Plan both ways, train in turns, print."""
    shape(hosts, mbit_per_s)
    folder = out / f"{name}-{mbit_per_s}"
    folder.mkdir()
    cluster = measured_cluster(hosts, mbit_per_s, folder)
    paths = {way: folder / f"{way.replace(' ', '-')}.yaml" for way in _WAYS}
    plans = {
        way: spindle_cli.plan(
            profile.model_copy(update={"updates_by_parts": by_parts}),
            cluster,
            paths[way],
            strategy="sequential",
            sums="dense",
        )
        for way, by_parts in _WAYS.items()
    }
    taken: dict[str, list[list[float]]] = {way: [] for way in _WAYS}
    losses: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for way in _WAYS:
            run = planned(paths[way])(Job(hosts, out / f"{name}.yaml", num_steps, folder))
            taken[way].append(run.iterations_s)
            losses[way] = run.losses
    once = median(chain(*taken["at once"]))
    for way, plan in plans.items():
        measured_s = median(chain(*taken[way]))
        runs = ", ".join(f"{median(each) * 1e3:.0f}" for each in taken[way])
        print(
            f"{name:12} {mbit_per_s:5} {way:9} {plan.predicted.iteration_s * 1e3:8.1f} ms"
            f" {measured_s * 1e3:8.1f} ms {measured_s / once:7.3f}  {runs}",
            flush=True,
        )
    print(f"{'':12} same losses: {losses['at once'] == losses['by parts']}", flush=True)


def run(
    names: Sequence[str], optimizer: str, speeds: Sequence[int], rounds: int, num_steps: int, out: Path
) -> None:
    """Profile each workload once, and compare at each speed."""
    print(
        f"{'workload':12} {'Mbit':>5} {'updates':9} {'predicted':>11} {'measured':>11} {'of once':>7}  runs"
    )
    with two_hosts() as hosts:
        for name in names:
            workload = write_workload(name, optimizer, num_steps, out)
            shape(hosts, speeds[0])
            folder = out / f"{name}-link"
            folder.mkdir()
            cluster = measured_cluster(hosts, speeds[0], folder)
            profile = spindle_cli.profile(workload, cluster=cluster, accept_noise=True)
            for speed in speeds:
                compare(hosts, name, profile, speed, rounds, num_steps, out)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--speeds", type=int, nargs="*", default=[1000, 500], metavar="MBIT", help="of the link"
    )
    parser.add_argument(
        "--workloads", nargs="*", default=list(WORKLOADS), metavar="NAME", help="what is trained"
    )
    parser.add_argument("--optimizer", default="AdamW", metavar="NAME", help="of torch.optim")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each plan")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    asked = parser.parse_args()
    try:
        require_tools()
        with tempfile.TemporaryDirectory() as folder:
            run(asked.workloads, asked.optimizer, asked.speeds, asked.rounds, asked.steps, Path(folder))
    except BenchError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
