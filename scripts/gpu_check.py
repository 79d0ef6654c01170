"""Everything that only a GPU can show, in less than ten minutes: one table, and one JSON file.

    python scripts/gpu_check.py [--device cuda|cpu] [--size full|toy] [--budget SECONDS] [-o FILE.json]

* tests: tests/gpu.
* verify: the zoo's small workloads on one rank against plain PyTorch.
* curve, time, memory: the paper's workloads at full size on one device: each op with its share of the
  device's peak, the iteration and the memory as predicted and as measured.

What the time does not suffice for is said, not left out. `--device cpu --size toy` takes the same way with
the digits' workload, so that it is known to work before a GPU is there. Exit codes: 0, nothing failed;
1, something did; 3, there is no such device.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import yaml
from gpu_bench.commands import ROOT, SCRIPTS, CommandFailedError, Commands, NotReachedError
from gpu_bench.record import Line, Status, curve_lines, document, memory_line, passed, table, time_line

from spindle_cli.files.artifact import write_json
from spindle_cli.files.request import RunRequest
from spindle_cli.files.run_files import PREDICTED_FILE, PredictedVsMeasured
from spindle_cli.files.writing import write_text
from spindle_cli.plan.types import Plan
from spindle_cli.profile.machine.devices import cluster_device_name
from spindle_cli.profile.machine.machine import describe_device
from spindle_cli.profile.types import Profile
from spindle_cli.units import GIB

FAILED, NO_DEVICE = 1, 3
FULL = ("clip-4", "ofasys-4", "qwen-val")
TOY = ("digits",)
ZOO = {"full": ("digits", "clip-4-laptop", "ofasys-4-laptop", "qwen-val-laptop"), "toy": TOY}
TIME_LIMIT_S = {"full": 0.2, "toy": 0.02}
MEMORY_STEPS, TIMED_STEPS, VERIFIED_STEPS = 3, 8, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at everything; the exit code."""
    asked = _parse(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: there is no GPU here: torch finds no CUDA device. Nothing was looked at.")
        print("`--device cpu --size toy` takes the same way on the CPU, to see that it works.")
        return NO_DEVICE
    described = describe_device(asked.device, 1)
    commands = Commands(asked.budget)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        name = cluster_device_name(described)
        write_cluster(folder / "cluster.yaml", name, described.memory_bytes)
        for line in look(commands, folder, name, asked.size):
            print(f"{commands.spent_s:5.0f} s  {line.section:7} {line.subject}: {line.status}", flush=True)
            lines.append(line)
    print()
    print(table(described.name, lines))
    found = document(described.name, described.memory_bytes, commands.spent_s, lines)
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    write_text(asked.output, json.dumps(found, indent=1) + "\n")
    print(f"written: {asked.output}")
    return 0 if passed(lines) else FAILED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=tuple(ZOO), default="full")
    parser.add_argument("--budget", type=float, default=560.0, metavar="SECONDS")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "gpu-check.json")
    return parser.parse_args(arguments)


def look(commands: Commands, folder: Path, device: str, size: str) -> Iterator[Line]:
    """At all of it, what says most first."""
    yield from guarded("tests", "tests/gpu", lambda: gpu_tests(commands))
    for workload in ZOO[size]:
        find = partial(verified, commands, folder / f"verify-{workload}", workload)
        yield from guarded("verify", workload, find)
    for workload in FULL if size == "full" else TOY:
        own = folder / workload
        finds = (
            ("curve", partial(curves, commands, own, workload, device, TIME_LIMIT_S[size])),
            ("time", partial(timed, commands, own, workload)),
            ("memory", partial(memory, commands, own, workload)),
        )
        for section, find in finds:
            yield from guarded(section, workload, find)


def guarded(section: str, subject: str, find: Callable[[], Iterator[Line]]) -> Iterator[Line]:
    """What was found; a line that says so where a command failed or the time was up."""
    try:
        yield from find()
    except NotReachedError:
        yield Line(section, subject, "not reached", "no time was left", {})
    except CommandFailedError as error:
        yield Line(section, subject, "failed", str(error), {})


def gpu_tests(commands: Commands) -> Iterator[Line]:
    """The tests that need a GPU; all are skipped where there is none."""
    out = commands.python("-m", "pytest", "-rs", "tests/gpu")
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|skipped)", out)}
    status: Status = "ok" if counts.get("passed") else "skipped"
    said = ", ".join(f"{number} {what}" for what, number in counts.items()) or "none was run"
    yield Line("tests", "tests/gpu", status, said, {what: float(number) for what, number in counts.items()})


def verified(commands: Commands, own: Path, workload: str) -> Iterator[Line]:
    """A plan's training against plain PyTorch."""
    plan = planned(commands, own, workload, 0.01)
    out = commands.spindle("verify", plan, "--steps", str(VERIFIED_STEPS), "--no-randomness", "--json")
    report = json.loads(out)
    found = [check["largest"]["relative"] for check in report["checks"] if check["largest"]]
    largest = max((each for each in found if each is not None), default=0.0)
    said = f"{report['steps']} steps, largest relative difference {largest:.1e}"
    yield Line("verify", workload, "ok" if report["same"] else "failed", said, {"largest": largest})


def curves(commands: Commands, own: Path, workload: str, device: str, limit_s: float) -> Iterator[Line]:
    """The profile, measured; the plan that goes with it is made for what follows."""
    planned(commands, own, workload, limit_s)
    yield from curve_lines(workload, device, Profile.read(own / "profile.json"))


def timed(commands: Commands, own: Path, workload: str) -> Iterator[Line]:
    """The iteration, trained by the plan."""
    require_plan(own)
    run_dir = own / "run"
    commands.spindle("launch", own / "plan.yaml", "--run-dir", run_dir, "--steps", str(TIMED_STEPS))
    iteration = PredictedVsMeasured.read(run_dir / PREDICTED_FILE).iteration
    yield time_line(workload, iteration.predicted_s, iteration.measured_s)


def memory(commands: Commands, own: Path, workload: str) -> Iterator[Line]:
    """The device's fullest moment."""
    require_plan(own)
    plan = Plan.read(own / "plan.yaml")
    folder = own / "memory"
    (folder / "workers").mkdir(parents=True)
    request = RunRequest(
        plan=own / "plan.yaml",
        workload=str(source_of(workload)),
        steps=MEMORY_STEPS,
        run_dir=folder,
        device_type="cpu" if plan.cluster.is_cpu else "cuda",
        backend=plan.cluster.talks_by,
    )
    write_json(folder / "request.json", request)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", f"--log-dir={folder}")
    commands.python(*launcher, "-m", "gpu_bench.rank", folder / "request.json", folder=SCRIPTS)
    measured = int((folder / "peak.0").read_text(encoding="utf-8"))
    yield memory_line(workload, plan.predicted.peak_memory_bytes[0], measured)


def planned(commands: Commands, own: Path, workload: str, limit_s: float) -> Path:
    """A profile measured on the device, and the plan for one of it."""
    own.mkdir()
    profile, plan = own / "profile.json", own / "plan.yaml"
    limits = ("--nproc", "1", "--time-limit", str(limit_s), "--no-check", "--accept-noise")
    commands.spindle("profile", source_of(workload), "-o", profile, *limits)
    commands.spindle("plan", profile, "--cluster", own.parent / "cluster.yaml", "-o", plan)
    return plan


def require_plan(own: Path) -> None:
    """What follows from a plan is not reached without it.

    Raises:
        NotReachedError: there is none.
    """
    if not (own / "plan.yaml").exists():
        raise NotReachedError


def source_of(workload: str) -> Path:
    """The workload's file."""
    return ROOT / "configs" / "workloads" / f"{workload}.yaml"


def write_cluster(path: Path, name: str, memory_bytes: int) -> None:
    """A cluster of one such device; nothing moves between devices, so that links do not matter."""
    link = {"latency_us": 10, "bandwidth_gb_per_s": 100}
    cluster = {
        "schema": "spindle.cluster/1",
        "name": "here",
        "nodes": [{"devices": 1, "device": name, "memory_gib": round(memory_bytes / GIB, 1)}],
        "links": {"intra_node": link, "inter_node": link},
    }
    write_text(path, yaml.safe_dump(cluster))


if __name__ == "__main__":
    sys.exit(main())
