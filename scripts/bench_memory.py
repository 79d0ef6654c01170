"""Peak memory of each device: by a plan, as the plan predicts it, and with DistributedDataParallel.

    python scripts/bench_memory.py [--devices N ...] [--workloads NAME ...] [--strategies NAME ...]
        [--variants NAME ...]

Trains three steps of each workload in N processes of this machine and counts the bytes of live tensors.
Profiles are estimated, so sizes are exact and times are not. Prints a table. Variants are trained or planned
in other ways; DistributedDataParallel is measured for the workload as it is alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_commands import run_command
from memory_bench.rank import STEPS, read_peaks
from memory_bench.variants import VARIANTS, Estimates, plan_variant, write_memo, write_run, write_variant

from spindle_cli.files.cluster import Cluster
from spindle_cli.launch.build import TORCHRUN
from spindle_cli.plan.types import StrategyName
from spindle_cli.units import MIB

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = ("digits", "clip-4-laptop", "ofasys-4-laptop", "qwen-val-laptop", "senses-6")
KNOWN = sorted(path.stem for path in (ROOT / "configs" / "workloads").glob("*.yaml"))
STRATEGIES: tuple[StrategyName, ...] = ("spindle", "sequential")
PLAIN = next(iter(VARIANTS))
COLUMNS = (
    "workload",
    "devices",
    "plan",
    "variant",
    "DDP, MiB",
    "ours, MiB",
    "predicted, MiB",
    "ours / DDP",
    "predicted / ours",
)


@dataclass(frozen=True)
class Row:
    """Of one training: bytes of each rank's peak, as measured and as the plan says; with DDP where known."""

    workload: str
    num_devices: int
    strategy: str
    variant: str
    measured: tuple[int, ...]
    predicted: tuple[int, ...]
    ddp: tuple[int, ...] | None

    @property
    def ratios(self) -> tuple[float, ...]:
        """Predicted over measured, of each rank."""
        return tuple(said / found for said, found in zip(self.predicted, self.measured, strict=True))

    def line(self) -> str:
        """A line of the table: the largest rank in MiB, and the ratios of all ranks."""
        ddp, share = "", ""
        if self.ddp is not None:
            ddp, share = f"{max(self.ddp) / MIB:.1f}", f"{max(self.measured) / max(self.ddp):.2f}"
        cells = (
            self.workload,
            str(self.num_devices),
            self.strategy,
            self.variant,
            ddp,
            f"{max(self.measured) / MIB:.1f}",
            f"{max(self.predicted) / MIB:.1f}",
            share,
            f"{min(self.ratios):.3f} to {max(self.ratios):.3f}",
        )
        return f"| {' | '.join(cells)} |"


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=(2, 4), metavar="N")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=KNOWN, metavar="NAME")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, metavar="NAME")
    parser.add_argument("--variants", nargs="+", default=(PLAIN,), choices=list(VARIANTS), metavar="NAME")
    asked = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |")
    print("|" + "---|" * len(COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        for workload in asked.workloads:
            for count in asked.devices:
                source = ROOT / "configs" / "workloads" / f"{workload}.yaml"
                to = Path(folder) / f"{workload}-{count}"
                for row in rows(source, count, asked.strategies, asked.variants, to):
                    print(row.line(), flush=True)


def rows(
    source: Path,
    num_devices: int,
    strategies: Sequence[StrategyName],
    variants: Sequence[str],
    folder: Path,
) -> Iterator[Row]:
    """Measure a workload by plans of these strategies, in these variants."""
    cluster = Cluster.read(ROOT / "configs" / "clusters" / f"cpu-{num_devices}.yaml")
    runs = folder / "runs"
    runs.mkdir(parents=True)
    plans = {}
    estimates = Estimates(cluster, folder)
    memo = write_memo(source, folder)
    for number, name in enumerate(variants):
        own = folder / f"variant-{number}"
        own.mkdir()
        workload = write_variant(source, VARIANTS[name], own)
        for strategy in strategies:
            profile = estimates.of(workload, VARIANTS[name])
            plan = plan_variant(profile, VARIANTS[name], cluster, strategy, own)
            if plan is not None:
                run = runs / f"{number:02d}-{strategy}"
                write_run(plan, workload, run, STEPS, memo)
                plans[run] = name, plan
    torchrun(num_devices, "ours", str(runs))
    ddp = None
    if PLAIN in variants:
        (folder / "ddp").mkdir()
        torchrun(num_devices, "ddp", str(source), str(folder / "ddp"))
        ddp = read_peaks(folder / "ddp", num_devices)
    for run, (name, plan) in plans.items():
        yield Row(
            workload=source.stem,
            num_devices=num_devices,
            strategy=plan.strategy,
            variant=name,
            measured=read_peaks(run, num_devices),
            predicted=plan.predicted.peak_memory_bytes,
            ddp=ddp if name == PLAIN else None,
        )


def torchrun(num_devices: int, *arguments: str, module: str = "memory_bench.rank") -> None:
    """Run the ranks, forked from one process that has torch; ends with what they said where they fail."""
    how = ["--nnodes=1", f"--nproc-per-node={num_devices}", "--max-restarts=0", "--start-method=fork"]
    meeting = ["--rdzv-backend=spindle", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=rank=0"]
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", TORCHRUN, str(Path(folder) / "exits.json"), *how, *meeting]
        run_command([sys.executable, *launcher, "-m", module, *arguments])


if __name__ == "__main__":
    main()
