"""The runtime's benchmark: two hosts with a shaped link between them train the same models in several ways.

    python scripts/bench_runtime.py [--speeds MBIT ...] [--only NAME ...] [--rounds N] [--steps N] [--out DIR]
        [--no-page]

As root, with iproute2. The hosts are network namespaces with a core each. Plain DistributedDataParallel and
FSDP2, which train the tasks one after another, alternate with our `sequential` and `spindle` plans, made from
a profile of this workload and the link as measured. Writes docs/benchmarks/two-hosts.json and .md; with some
speeds only, the others' last results stay.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import yaml
from runtime_bench.contestants import Contestant, Job, Run, by_hand, plain, planned
from runtime_bench.errors import BenchError
from runtime_bench.hosts import Host, python, require_tools, shape, two_hosts
from runtime_bench.measured_cluster import measured_cluster
from runtime_bench.page import NAMES, Outcome, Trial, here_and_now, read_outcome, write_outcome

from spindle_cli.plan.types import Plan

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "benchmarks"
WORKLOADS = ROOT / "configs" / "workloads"
SPEEDS = (2000, 1000, 500)
# The workload with a heavy shared trunk, and the speed at which it is trained.
TRUNK = "generalist-5"
TRUNK_SPEEDS = (1000,)
# One task alone is trained at this speed.
ALONE_SPEED = 1000


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--speeds", type=int, nargs="*", default=SPEEDS, metavar="MBIT", help="Mbit/s of the link"
    )
    parser.add_argument(
        "--only",
        choices=NAMES,
        nargs="*",
        default=(),
        help="these and DDP, without writing the page",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    parser.add_argument(
        "--trunk-speeds",
        type=int,
        nargs="*",
        default=TRUNK_SPEEDS,
        metavar="MBIT",
        help="the same for the workload with a heavy shared trunk",
    )
    parser.add_argument("--accept-noise", action="store_true", help="profile although others use the machine")
    parser.add_argument("--without-alone", action="store_true", help="leave out one task alone")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep profiles, plans and runs here")
    parser.add_argument("--no-page", action="store_true", help="print the results only")
    asked = parser.parse_args()
    try:
        require_tools()
        with tempfile.TemporaryDirectory() as temporary, two_hosts() as hosts:
            out = Path(temporary) if asked.out is None else asked.out.resolve()
            taking_part = {"ddp", *(asked.only or NAMES)}
            options = ("--accept-noise",) if asked.accept_noise else ()
            bench = Bench(hosts, out, asked.rounds, asked.steps, taking_part, options)
            trials = [bench.all_tasks("senses-6", speed) for speed in asked.speeds]
            if not asked.without_alone:
                trials.append(bench.one_task(ALONE_SPEED))
            trials += [bench.all_tasks(TRUNK, speed) for speed in asked.trunk_speeds]
    except BenchError as error:
        print(f"bench-runtime: {error}", file=sys.stderr)
        sys.exit(1)
    outcome = Outcome(trials={trial.name: trial for trial in trials})
    if not asked.no_page and not asked.only:
        write_outcome(RECORDS, read_outcome(RECORDS).updated(outcome))


class Bench:
    """The benchmark on two hosts; profiles are made once and kept in `out`."""

    def __init__(
        self,
        hosts: tuple[Host, Host],
        out: Path,
        rounds: int,
        steps: int,
        taking_part: Collection[str],
        profile_options: Sequence[str] = (),
    ) -> None:
        self.profile_options = profile_options
        out.mkdir(parents=True, exist_ok=True)
        self.hosts = hosts
        self.out = out
        self.rounds = rounds
        self.steps = steps
        self.taking_part = taking_part

    def all_tasks(self, name: str, mbit_per_s: int) -> Trial:
        """All contestants that take part, on all tasks of a workload."""
        workload = WORKLOADS / f"{name}.yaml"
        folder, plans = self._prepare(workload, mbit_per_s, ("sequential", "spindle"))
        everyone = {
            "ddp": plain("ddp"),
            "fsdp2": plain("fsdp2"),
            **{name: planned(path) for name, path in plans.items()},
            **({"hand": by_hand} if name == TRUNK else {}),
        }
        contestants = {name: run for name, run in everyone.items() if name in self.taking_part}
        return self._alternate(f"{name}, {mbit_per_s} Mbit/s", folder, workload, contestants, plans)

    def one_task(self, mbit_per_s: int) -> Trial:
        """One task alone in one wave, against the same by DDP."""
        folder, plans = self._prepare(WORKLOADS / "senses-1.yaml", mbit_per_s, ("sequential",))
        contestants = {"ddp": plain("ddp"), "sequential": planned(plans["sequential"])}
        return self._alternate(
            f"senses-1, {mbit_per_s} Mbit/s", folder, WORKLOADS / "senses-1.yaml", contestants, plans
        )

    def _prepare(
        self, workload: Path, mbit_per_s: int, strategies: Sequence[str]
    ) -> tuple[Path, dict[str, Path]]:
        """Shape and measure the link, profile, plan; the folder of all files, and the plans by strategy."""
        shape(self.hosts, mbit_per_s)
        folder = self.out / f"{workload.stem}-{mbit_per_s}"
        folder.mkdir(exist_ok=True)
        cluster = folder / "cluster.yaml"
        measured = measured_cluster(self.hosts, mbit_per_s, folder)
        content = yaml.safe_dump(measured.model_dump(mode="json", by_alias=True), sort_keys=False)
        cluster.write_text(content, encoding="utf-8")
        profile = self.out / f"{workload.stem}.profile.json"
        if not profile.exists():
            asked = ("-o", profile, "--cluster", cluster, "--nproc", str(len(self.hosts)))
            spindle("profile", workload, *asked, *self.profile_options)
        plans = {strategy: folder / f"{strategy}.yaml" for strategy in strategies}
        for strategy, path in plans.items():
            spindle("plan", profile, "--cluster", cluster, "-o", path, "--strategy", strategy)
        return folder, plans

    def _alternate(
        self,
        name: str,
        folder: Path,
        workload: Path,
        contestants: Mapping[str, Contestant],
        plans: Mapping[str, Path],
    ) -> Trial:
        """Run the contestants in turn, `rounds` times."""
        job = Job(self.hosts, workload, self.steps, folder)
        runs: dict[str, list[Run]] = {contestant: [] for contestant in contestants}
        for _ in range(self.rounds):
            for contestant, run in contestants.items():
                runs[contestant].append(run(job))
        predicted = {strategy: Plan.read(path).predicted.iteration_s for strategy, path in plans.items()}
        trial = Trial.of(name, here_and_now(), runs, predicted)
        print("\n".join(trial.lines()), flush=True)
        return trial


def spindle(*words: str | Path) -> None:
    """Run one command of the command line on this machine.

    Raises:
        BenchError: it failed, with what it said.
    """
    done = subprocess.run(python("-m", "spindle_cli", *words), check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError(f"`spindle {words[0]}` failed: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
