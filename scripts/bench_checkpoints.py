"""How long a step takes with a checkpoint after each: none, one written at once, and one in the background.

    python scripts/bench_checkpoints.py [--workload NAME] [--steps N]

Trains in two processes of this machine, from step to step, and prints the median over all steps but the
first two. The profile is estimated. Prints a table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench_commands import run_command

from spindle_cli.files.artifact import write_json
from spindle_cli.files.request import RunRequest

ROOT = Path(__file__).resolve().parent.parent
NUM_DEVICES = 2
WARM_UP = 2
WAYS = {
    "none": {},
    "before the next step": {"checkpoint_every": 1},
    "in the background": {"checkpoint_every": 1, "async_checkpoints": True},
}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="senses-6", metavar="NAME")
    parser.add_argument("--steps", type=int, default=12, metavar="N")
    asked = parser.parse_args()
    source = ROOT / "configs" / "workloads" / f"{asked.workload}.yaml"
    cluster = ROOT / "configs" / "clusters" / f"cpu-{NUM_DEVICES}.yaml"
    print("| checkpoints | s from step to step |\n|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile, plan = folder / "profile.json", folder / "plan.yaml"
        spindle("profile", source, "-o", profile, "--cluster", cluster, "--estimate")
        spindle("plan", profile, "--cluster", cluster, "-o", plan)
        for number, (way, settings) in enumerate(WAYS.items()):
            run_dir = folder / str(number)
            (run_dir / "workers").mkdir(parents=True)
            request = RunRequest(
                plan=plan, workload=str(source), steps=asked.steps, run_dir=run_dir, keep=1, **settings
            )
            write_json(run_dir / "request.json", request)
            print(f"| {way} | {measure(run_dir):.3f} |", flush=True)


def spindle(*arguments: str | Path) -> None:
    """Run a command; its output only where it fails."""
    run_command([sys.executable, "-m", "spindle_cli", *map(str, arguments)])


def measure(run_dir: Path) -> float:
    """Train; seconds from the beginning of a step to that of the next one, on rank 0."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_DEVICES}"]
    torchrun.append(f"--log-dir={run_dir / 'torchrun'}")
    times = run_dir / "times"
    run_command([sys.executable, *torchrun, "-m", "step_times", str(run_dir / "request.json"), str(times)])
    begins = [float(line) for line in times.read_text(encoding="utf-8").split()]
    return median(
        after - before for before, after in zip(begins[WARM_UP:], begins[WARM_UP + 1 :], strict=False)
    )


if __name__ == "__main__":
    main()
