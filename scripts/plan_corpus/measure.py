"""Plans a problem by the command, checks and simulates its plan, and keeps what was found.

What is kept is of one state of the code: a run that is stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from math import ceil
from pathlib import Path

from paper_profiles import ROOT

import spindle_cli
from plan_corpus.problems import Problem
from plan_corpus.rows import Row
from spindle_cli.check.run import check_plan
from spindle_cli.plan.file import read_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile
from spindle_cli.simulate.run import simulate
from spindle_cli.units import GIB

FOLDER = ROOT / "build" / "plan-corpus"
# By what they count, their keys in plan files.
BOUNDS = {
    "whole batches": "lower_bound_s",
    "with memory": "lower_bound_with_memory_s",
    "with links": "lower_bound_with_links_s",
}
# What decides what plans are like.
PACKAGES = ("account", "check", "costs", "files", "plan", "profile", "program", "simulate")


def code_digest() -> str:
    """Of the code that plans, checks and simulates."""
    source = Path(spindle_cli.__file__).parent
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((source / package).rglob("*.py")):
            digest.update(f"{path.relative_to(source)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def inputs_digest(problem: Problem) -> str:
    """Of the files and the options."""
    text = "\0".join((problem.profile_text(), problem.cluster_text(), *problem.options))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def kept_rows(code: str) -> dict[str, Row]:
    """What was found of problems by this code."""
    path = FOLDER / f"{code}.jsonl"
    if not path.exists():
        return {}
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["name"]: Row.of(line["row"]) for line in lines}


def keep(code: str, name: str, row: Row) -> None:
    """Add a row."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{code}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, "row": row.written()}) + "\n")


def measured(problem: Problem, budget_s: float) -> Row:
    """Plan, check and simulate."""
    folder = FOLDER / problem.name
    folder.mkdir(parents=True, exist_ok=True)
    profile, cluster, file = (folder / name for name in ("profile.json", "cluster.yaml", "plan.yaml"))
    profile.write_text(problem.profile_text(), encoding="utf-8")
    cluster.write_text(problem.cluster_text(), encoding="utf-8")
    file.unlink(missing_ok=True)
    inputs = inputs_digest(problem)
    code, planning_s = _command(
        ["plan", str(profile), "--cluster", str(cluster), "-o", str(file), *problem.options],
        folder / "output.txt",
        budget_s,
    )
    if code != 0:
        return Row(inputs, round(planning_s, 2), code)
    plan = read_plan(file)
    violations = tuple(map(str, check_plan(plan, Profile.read(profile))))
    simulated_s, planned_s, bound_s = seconds(plan)
    bounds = {name: bounds_of(plan, key) for name, key in BOUNDS.items()}
    peaks: dict[str, float] = {}
    for device, peak in zip(plan.cluster.type_of, plan.of_steps.peak_memory_bytes, strict=True):
        peaks[device] = max(peaks.get(device, 0.0), round(peak / GIB, 3))
    used = {device for piece in plan.every_slice for device in piece.devices}
    return Row(
        inputs,
        round(planning_s, 2),
        code,
        simulated_s=float(f"{simulated_s:.8g}"),
        planned_s=float(f"{planned_s:.8g}"),
        lower_bound_s=float(f"{bound_s:.8g}"),
        bounds_s={name: float(f"{bound:.8g}") for name, bound in bounds.items() if bound is not None},
        peak_memory_gib=peaks,
        slices=len(plan.every_slice),
        idle_devices=plan.cluster.num_devices - len(used),
        plan=hashlib.sha256(file.read_bytes()).hexdigest()[:16],
        violations=violations,
    )


def seconds(plan: Plan) -> tuple[float, float, float]:
    """Simulated, planned, and the bound of every schedule: of a step of all tasks, or the mean of the steps
    where sets of them run; of islands, of a step within one.
    """
    members = _members(plan)
    return (
        sum(share * simulate(own).iteration_s for share, own in members),
        sum(share * own.predicted.iteration_s for share, own in members),
        sum(
            share * (own.predicted.lower_bound_any_s or own.predicted.lower_bound_s) for share, own in members
        ),
    )


def bounds_of(plan: Plan, key: str) -> float | None:
    """A bound by its key, of the steps that `seconds` is of; None where one does not have it."""
    each = [(share, getattr(own.predicted, key)) for share, own in _members(plan)]
    return None if any(bound is None for _, bound in each) else sum(share * bound for share, bound in each)


def _members(plan: Plan) -> list[tuple[float, Plan]]:
    return [(each.share, plan.set_plans[each.tasks]) for each in plan.task_sets] or [(1.0, plan)]


def _command(arguments: list[str], said: Path, budget_s: float) -> tuple[int | None, float]:
    """The command's exit code and processor seconds; None if it took more of them than its budget."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Modules are compiled once, and not in every command.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with said.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "spindle_cli", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        most_s = ceil(budget_s)
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (most_s, most_s + 5))
        # Not process.wait(), which does not tell what this child alone took.
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    code = None if process.returncode == -signal.SIGXCPU else process.returncode
    return code, usage.ru_utime + usage.ru_stime
