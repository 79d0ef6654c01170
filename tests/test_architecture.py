"""The rules that keep the stages apart: who may import whom, what loads torch, how large a file may be."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "spindle_cli"
MAX_LINES = 400

# Every package, and the other packages of ours that it may import anything from. Modules at the top level
# (errors, units, artifact, ...) are for all; `cli` knows every stage.
MAY_IMPORT = {
    "workload": set(),
    "costs": set(),
    "checkpoint": {"workload"},  # what a workload takes over from one
    "profile": {"workload", "costs"},
    "plan": {"profile", "costs"},
    "program": {"plan", "costs"},
    "check": {"costs"},
    "show": {"program"},
    "runtime": {
        "workload",
        "checkpoint",
        "program",
        "check",
        "costs",
    },  # it keeps to the buffers that memory counts
    "launch": {
        "check",
        "program",
        "workload",
        "checkpoint",
    },  # the workload's fingerprint is compared before a launch
    "elastic": {"launch", "plan", "check", "questions"},
    "export": {"workload", "runtime", "checkpoint"},
    "verify": {"launch", "runtime", "workload", "check"},
    "simulate": {"program", "costs"},
    "questions": {"plan"},
    "report": {"plan", "check", "simulate", "costs"},  # it shows what each of them says
    "zoo": {"workload"},
}
# Types that are a stage's contract, and may be imported from anywhere.
CONTRACTS = {
    "plan.types",
    "plan.file",
    "profile.types",
    "profile.metagraph",
    "program.types",
    "workload.file",
}
# Packages whose import must not load torch: planning runs where there is none.
WITHOUT_TORCH = (
    "costs",
    "profile.types",
    "plan",
    "check",
    "program",
    "show",
    "simulate",
    "questions",
    "report",
    "cli",
    "checkpoint.files",
    "checkpoint.names",
    "checkpoint.regions",
    "checkpoint.carry_over",
)


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name below spindle_cli, and file, of every module."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_of(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, anywhere in it, as a dotted name below spindle_cli."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("spindle_cli."):
            base = node.module.removeprefix("spindle_cli.")
            for alias in node.names:
                is_module = (SOURCE / base.replace(".", "/") / f"{alias.name}.py").exists()
                yield f"{base}.{alias.name}" if is_module else base
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("spindle_cli.")
                for alias in node.names
                if alias.name.startswith("spindle_cli.")
            )


def test_every_package_has_a_rule() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages - {"cli"} <= set(MAY_IMPORT)


def test_stages_import_only_what_they_may() -> None:
    broken = []
    for name, path in modules():
        package = name.split(".")[0]
        if package not in MAY_IMPORT:
            continue
        for imported in imports_of(path):
            other = imported.split(".")[0]
            allowed = other == package or other in MAY_IMPORT[package] or imported in CONTRACTS
            if not allowed and "." in imported:
                broken.append(f"{name} imports {imported}")
    assert not broken, "\n".join(broken)


def test_the_checker_takes_only_types_and_costs_from_planning() -> None:
    for name, path in modules():
        if name.split(".")[0] == "check":
            taken = {imported for imported in imports_of(path) if imported.startswith(("plan", "profile"))}
            assert taken <= {"plan.types", "profile.types", "profile.metagraph"}, name


def test_planning_and_the_command_line_load_no_torch() -> None:
    names = [
        f"spindle_cli.{name}"
        for name, _ in modules()
        if name in WITHOUT_TORCH or name.startswith(tuple(f"{package}." for package in WITHOUT_TORCH))
    ]
    code = f"import sys\nfor name in {names!r}: __import__(name)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_help_is_instant() -> None:
    """Under 0.3 s; the processor's time is measured, since the machine may be busy with other tests."""
    command = [sys.executable, "-m", "spindle_cli", "--help"]
    times_s = []
    for _ in range(3):
        before = os.times()
        subprocess.run(command, check=True, capture_output=True, timeout=30)
        after = os.times()
        times_s.append(
            after.children_user - before.children_user + after.children_system - before.children_system
        )
    assert median(times_s) < 0.3


def test_help_loads_no_stage() -> None:
    code = (
        "import sys\nfrom spindle_cli.cli import app\n"
        "loaded = [m for m in sys.modules if m.startswith('spindle_cli.')]\n"
        "assert {m.split('.')[1] for m in loaded} <= {'cli', 'errors', 'at_once'}, loaded\n"
        "assert not {'torch', 'pydantic', 'rich.console', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("folder", ["src", "tests", "scripts", "examples"])
def test_files_stay_readable(folder: str) -> None:
    root = SOURCE.parent.parent / folder
    long = {
        str(path.relative_to(root)): count
        for path in root.rglob("*.py")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long
