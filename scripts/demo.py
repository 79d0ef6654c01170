"""The demo: train a real multi-task, multi-modal model by a plan, in four processes on this CPU.

    python scripts/demo.py [--short] [--out DIR]

Runs the `spindle` command line as any user would: profile, plan, check, show, verify, launch; then puts
held-out samples to the trained model. Ends with the first command that fails, and its exit code.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from spindle_cli.files.run_files import PREDICTED_FILE, PredictedVsMeasured
from spindle_cli.plan.types import Plan
from spindle_cli.units import format_seconds

ROOT = Path(__file__).resolve().parent.parent
WORKLOAD = ROOT / "configs/workloads/digits.yaml"
CLUSTER = ROOT / "configs/clusters/cpu-4.yaml"


@dataclass(frozen=True)
class Length:
    """How long to measure and to train, and the share of held-out images that must then find their name
    (chance: 0.1).

    `measured_s`: at most so many seconds for an op on a share. `steps`: None for as many as the workload file
    says.
    """

    measured_s: float
    steps: int | None
    verify_steps: int
    at_least: float


FULL = Length(measured_s=0.5, steps=None, verify_steps=3, at_least=0.9)
SHORT = Length(measured_s=0.1, steps=100, verify_steps=1, at_least=0.25)


def run(title: str, module: str, *arguments: str | Path) -> None:
    """Run one command under a heading, and say how long it took; exits if it fails."""
    words = [str(argument) for argument in arguments]
    shown = "spindle" if module == "spindle_cli" else f"python -m {module}"
    print(f"\n=== {title}\n$ {shown} {shlex.join(words)}", flush=True)
    begin = time.perf_counter()
    code = subprocess.run([sys.executable, "-m", module, *words], check=False).returncode
    print(f"({format_seconds(time.perf_counter() - begin)})", flush=True)
    if code != 0:
        print(f"demo: this command failed with exit code {code}", file=sys.stderr)
        sys.exit(code)


def choose_out(wanted: Path | None) -> Path:
    """The folder for all that the demo makes: as wanted, or the first free of runs/demo-1, -2, ..."""
    numbered = (Path("runs") / f"demo-{number}" for number in count(1))
    out = wanted or next(path for path in numbered if not path.exists())
    out.mkdir(parents=True, exist_ok=True)
    return out


def spindle(title: str, *arguments: str | Path) -> None:
    """Run one command of the `spindle` command line."""
    run(title, "spindle_cli", *arguments)


def demo(out: Path, length: Length) -> None:
    """All steps, from the workload file to the figures at the end."""
    profile, plan, sequential = out / "profile.json", out / "plan.yaml", out / "sequential.yaml"
    run_dir = out / "run"
    on_cluster = ("--cluster", CLUSTER)
    steps = () if length.steps is None else ("--steps", str(length.steps))
    verify_steps = ("--steps", str(length.verify_steps))
    evaluation = ("--run", run_dir, "--at-least", str(length.at_least))

    spindle(
        "Measure how every MetaOp scales",
        "profile",
        WORKLOAD,
        "-o",
        profile,
        *on_cluster,
        "--nproc",
        "4",
        "--time-limit",
        str(length.measured_s),
        "--accept-noise",  # whoever tries it out has other things running
    )
    spindle("Plan", "plan", profile, "-o", plan, *on_cluster)
    usual = ("-o", sequential, "--strategy", "sequential")
    spindle("For comparison, the usual way: task after task", "plan", profile, *usual, *on_cluster)
    spindle("Check the plan without the planner's code", "check", plan, "--profile", profile)
    spindle("Look at it", "show", plan)
    spindle("Prove that it trains the same model as one plain process", "verify", plan, *verify_steps)
    spindle("Train", "launch", plan, "--run-dir", run_dir, *steps)
    run("Put held-out samples to the trained model", "spindle_cli.zoo.digits.evaluate", *evaluation)
    print(f"\n=== Iteration\n{iteration_times(plan, sequential, run_dir)}")


def iteration_times(plan: Path, sequential: Path, run_dir: Path) -> str:
    """Predicted and measured seconds of an iteration."""
    measured = PredictedVsMeasured.read(run_dir / PREDICTED_FILE).iteration.measured_s
    predicted, usual = (Plan.read(path).predicted for path in (plan, sequential))
    rows = {
        "lower bound of any schedule": predicted.lower_bound_s,
        "predicted": predicted.iteration_s,
        "measured": measured,
        "predicted, task after task": usual.iteration_s,
    }
    return "\n".join(f"{name:30}{format_seconds(seconds):>10}" for name, seconds in rows.items())


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--short", action="store_true", help="the same path with shorter measurements and fewer steps, for CI"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for all files (default: runs/demo-N)")
    chosen = parser.parse_args()
    begin = time.perf_counter()
    out = choose_out(chosen.out)
    demo(out, SHORT if chosen.short else FULL)
    print(f"\nall done in {format_seconds(time.perf_counter() - begin)}; everything is in {out}")


if __name__ == "__main__":
    main()
