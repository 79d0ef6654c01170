"""Two hosts of unequal speed train the same model by several plans, and by plain DistributedDataParallel.

    python scripts/bench_mixed.py [--ratios R ...] [--speeds MBIT ...] [--workloads NAME ...] [--rounds N]
        [--steps N] [--out DIR] [--no-page]

As root, with iproute2 and control groups. The hosts are network namespaces with a core each, of whose time
their processes are granted a part (`runtime_bench/quota.py`): the fast one `--granted`, so that it has it
whatever else the machine does, the slow one `R` times as much. Each host's type of device is profiled
where it is, both profiles are merged, and the link is measured between the hosts. `spindle`, `dp-even` and
`dp-flops` plans and DDP take turns. Writes docs/benchmarks/unequal-hosts.json and the tables of
docs/benchmarks/mixed-devices.md; with some cells only, the others' last results stay.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from runtime_bench.contestants import Contestant, Job, Run, plain, planned
from runtime_bench.errors import BenchError
from runtime_bench.hosts import Host, python, require_tools, run_on_both, shape, two_hosts
from runtime_bench.mixed_page import FAST, PLANS, SLOW, Outcome, Trial, write_outcome
from runtime_bench.page import here_and_now
from runtime_bench.quota import Quota, granting

from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.plan.types import Plan

ROOT = Path(__file__).resolve().parent.parent
RATIOS, SPEEDS = (0.5, 0.25), (2000, 500)
# Of the senses (zoo/senses.py): six tasks, each of which can be on one host; and one task alone, of which
# both hosts take a part, with so many samples that compute rules.
WORKLOADS: dict[str, dict[str, object]] = {
    "senses-6": {"tasks": 6},
    "senses-1x4": {"tasks": 1, "batch_sizes": {"captioning": 48}},
}
# What dp-flops goes by; only their ratio counts.
FAST_TFLOPS = 0.08


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratios", type=float, nargs="*", default=RATIOS, metavar="R")
    parser.add_argument("--speeds", type=int, nargs="*", default=SPEEDS, metavar="MBIT", help="of the link")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--granted", type=float, default=0.5, metavar="PART", help="of a core, the fast host")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep profiles, plans and runs here")
    parser.add_argument("--no-page", action="store_true", help="print the results only")
    asked = parser.parse_args()
    trials: list[Trial] = []
    try:
        require_tools()
        with tempfile.TemporaryDirectory() as temporary, two_hosts() as hosts:
            bench = Bench(
                hosts, (asked.out or Path(temporary)).resolve(), asked.granted, asked.rounds, asked.steps
            )
            for ratio in asked.ratios:
                trials += bench.all_of(ratio, asked.workloads, asked.speeds)
    except BenchError as error:
        print(f"bench-mixed: {error}", file=sys.stderr)
        sys.exit(1)
    if not asked.no_page:
        write_outcome(ROOT / "docs" / "benchmarks", Outcome(trials={trial.name: trial for trial in trials}))


@dataclass(frozen=True)
class Bench:
    """The benchmark on two hosts; profiles are made once and kept in `out`."""

    hosts: tuple[Host, Host]
    out: Path
    granted: float
    rounds: int
    steps: int

    def all_of(self, ratio: float, workloads: Sequence[str], speeds: Sequence[int]) -> list[Trial]:
        """Every workload on every link, with the second host's speed a part of the first's."""
        found = []
        fast, slow = self.hosts
        with granting(self.granted) as whole, granting(self.granted * ratio) as part:
            unequal = replace(self, hosts=(replace(fast, quota=whole), replace(slow, quota=part)))
            for name in workloads:
                profile = unequal.profile(name, ratio)
                found += [unequal.trial(name, ratio, speed, profile) for speed in speeds]
        return found

    def workload(self, name: str) -> Path:
        """Its file."""
        path = self.out / f"{name}.yaml"
        train = {"optimizer": "AdamW", "lr": 1e-4, "seed": 0}
        build = {"model": "spindle_cli.zoo.senses:build", "args": WORKLOADS[name]}
        data = {"schema": "spindle.workload/1", **build, "train": train}
        path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        return path

    def profile(self, name: str, ratio: float) -> Path:
        """Of both types, each profiled as it is: two processes, as busy together as the hosts are."""
        self.out.mkdir(parents=True, exist_ok=True)
        cluster = self.out / "profiled.yaml"
        link = Link(latency_us=100, bandwidth_gb_per_s=0.25)
        write_cluster(cluster, make_cluster(ratio, link))
        fast, slow, both = (
            self.out / f"{name}-{part}.json" for part in ("fast", f"slow-{ratio:g}", f"both-{ratio:g}")
        )
        asked = (
            "profile",
            self.workload(name),
            "--cluster",
            cluster,
            "--nproc",
            "2",
            "--threads",
            "1",
        )
        for kind, path, cores in ((FAST, fast, self.granted), (SLOW, slow, self.granted * ratio)):
            if not path.exists():
                with granting(2 * cores) as quota:
                    spindle(*asked, "--device", kind, "-o", path, "--accept-noise", quota=quota)
        spindle("profile", "--merge", fast, "--merge", slow, "-o", both)
        return both

    def trial(self, name: str, ratio: float, mbit_per_s: int, profile: Path) -> Trial:
        """The contestants in turn, `rounds` times."""
        shape(self.hosts, mbit_per_s)
        folder = self.out / f"{name}-{ratio:g}-{mbit_per_s}"
        folder.mkdir(exist_ok=True)
        cluster = folder / "cluster.yaml"
        write_cluster(cluster, make_cluster(ratio, self.link(folder)))
        contestants: dict[str, Contestant] = {"ddp": plain("ddp")}
        predicted = {}
        for strategy in PLANS:
            path = folder / f"{strategy}.yaml"
            spindle("plan", profile, "--cluster", cluster, "-o", path, "--strategy", strategy)
            contestants[strategy] = planned(path)
            says = Plan.read(path).predicted
            predicted[strategy] = says.iteration_s, says.compute_s
        job = Job(self.hosts, self.workload(name), self.steps, folder)
        runs: dict[str, list[Run]] = {contestant: [] for contestant in contestants}
        for _ in range(self.rounds):
            for contestant, run in contestants.items():
                runs[contestant].append(run(job))
        trial = Trial.of((name, ratio, mbit_per_s), here_and_now(), runs, predicted)
        print("\n".join(trial.lines()), flush=True)
        return trial

    def link(self, folder: Path) -> Link:
        """Between the hosts, as measured now."""
        store, out = folder / "link.store", folder / "link.json"
        store.unlink(missing_ok=True)
        command = python("-m", "runtime_bench.link_between", store, out)
        run_on_both(self.hosts, [command, command], timeout_s=120, folder=Path(__file__).parent)
        return Link.model_validate_json(out.read_text(encoding="utf-8"))


def make_cluster(ratio: float, link: Link) -> Cluster:
    """A fast and a slow host."""
    return Cluster(
        name=f"one-and-{ratio:g}",
        nodes=(
            NodeGroup(devices=1, device=FAST, memory_gib=4, peak_tflops=FAST_TFLOPS),
            NodeGroup(devices=1, device=SLOW, memory_gib=4, peak_tflops=FAST_TFLOPS * ratio),
        ),
        links=Links(intra_node=link, inter_node=link),
    )


def write_cluster(path: Path, cluster: Cluster) -> None:
    """As a cluster file."""
    data = cluster.model_dump(mode="json", by_alias=True, exclude_none=True)
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def spindle(*words: str | Path, quota: Quota | None = None) -> None:
    """Run one command of the command line on this machine, in a control group if there is one.

    Raises:
        BenchError: it failed, with what it said.
    """
    command = [str(word) for word in python("-m", "spindle_cli", *words)]
    done = subprocess.run(
        command if quota is None else quota.command(command), check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise BenchError(f"`spindle {words[0]}` failed: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
