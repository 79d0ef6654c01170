"""Peak memory of each device: by a plan, as the plan predicts it, and with DistributedDataParallel.

    python scripts/bench_memory.py [--devices N ...] [--workloads NAME ...] [--strategies NAME ...]

Trains three steps of each workload in N processes of this machine and counts the bytes of live tensors.
Profiles are estimated, so sizes are exact and times are not. Prints a table.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from memory_bench.rank import STEPS

from spindle_cli.artifact import write_json
from spindle_cli.plan.types import Plan
from spindle_cli.request import RunRequest
from spindle_cli.units import MIB

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = ("digits", "clip-4-laptop", "ofasys-4-laptop", "qwen-val-laptop", "senses-6")
HEADER = (
    "| workload | devices | plan | DDP, MiB | ours, MiB | predicted, MiB | ours / DDP | predicted / ours |"
)
STRATEGIES = ("spindle", "sequential")


@dataclass(frozen=True)
class Row:
    """Of one training: bytes of each rank's peak, as measured and as the plan says."""

    workload: str
    num_devices: int
    strategy: str
    measured: tuple[int, ...]
    predicted: tuple[int, ...]
    ddp: tuple[int, ...]

    def line(self) -> str:
        """A line of the table: the largest rank in MiB, and the ratios of all ranks."""
        ratios = [said / found for said, found in zip(self.predicted, self.measured, strict=True)]
        return (
            f"| {self.workload} | {self.num_devices} | {self.strategy} | {max(self.ddp) / MIB:.1f} "
            f"| {max(self.measured) / MIB:.1f} | {max(self.predicted) / MIB:.1f} "
            f"| {max(self.measured) / max(self.ddp):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
        )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=(2, 4), metavar="N")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, metavar="NAME")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, metavar="NAME")
    asked = parser.parse_args()
    print(HEADER)
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for workload in asked.workloads:
            for count in asked.devices:
                for row in rows(workload, count, asked.strategies, Path(folder) / f"{workload}-{count}"):
                    print(row.line(), flush=True)


def rows(workload: str, num_devices: int, strategies: Sequence[str], folder: Path) -> Iterator[Row]:
    """Measure a workload by plans of these strategies."""
    folder.mkdir()
    source = ROOT / "configs" / "workloads" / f"{workload}.yaml"
    cluster = ROOT / "configs" / "clusters" / f"cpu-{num_devices}.yaml"
    profile = folder / "profile.json"
    spindle("profile", source, "-o", profile, "--cluster", cluster, "--estimate")
    ddp = peaks("ddp", source, num_devices, folder / "ddp")
    for strategy in strategies:
        path = folder / f"{strategy}.yaml"
        spindle("plan", profile, "--cluster", cluster, "-o", path, "--strategy", strategy)
        run_dir = folder / strategy
        (run_dir / "workers").mkdir(parents=True)
        request = RunRequest(plan=path, workload=str(source), steps=STEPS, run_dir=run_dir)
        write_json(run_dir / "request.json", request)
        measured = peaks("ours", run_dir / "request.json", num_devices, run_dir / "peaks")
        plan = Plan.read(path)
        yield Row(workload, num_devices, plan.strategy, measured, plan.predicted.peak_memory_bytes, ddp)


def spindle(*arguments: str | Path) -> None:
    """Run a command; its output only where it fails."""
    run([sys.executable, "-m", "spindle_cli", *map(str, arguments)])


def peaks(how: str, source: Path, num_devices: int, out: Path) -> tuple[int, ...]:
    """Each rank's peak bytes."""
    out.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_devices}"]
    run([sys.executable, *torchrun, "-m", "memory_bench.rank", how, str(source), str(out)])
    return tuple(int((out / str(rank)).read_text()) for rank in range(num_devices))


def run(command: list[str]) -> None:
    """Run a command here; ends with what it said where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT / "scripts", env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
