"""The rules that keep the stages apart: who may import whom, what loads torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "spindle_cli"

# Every package, and the other packages of ours that it may import anything from. What stands below all of
# them (errors, units, packages, files) is for all; `cli` knows every stage.
FOR_ALL = {"errors", "units", "packages", "files"}
MAY_IMPORT = {
    "files": set(),
    "process": set(),
    "workload": set(),
    "training": {"workload"},
    "analysis": {"workload", "training"},
    "operators": {"workload", "training", "analysis"},
    "costs": set(),
    "account": {"costs"},
    "checkpoint": {"workload", "training"},  # what a workload takes over from one
    "profile": {"workload", "training", "analysis", "operators", "costs", "process"},
    "plan": {"profile", "costs", "account", "simulate"},  # a second opinion of whole plans
    "program": {"costs", "account"},
    "check": {"costs", "account"},
    "show": {"program"},
    "runtime": {  # it keeps to the buffers and channels that memory counts
        "workload",
        "training",
        "analysis",
        "operators",
        "checkpoint",
        "program",
        "check",
        "account",
        "costs",
        "process",
    },
    "launch": {  # the workload's fingerprint is compared before a launch
        "check",
        "program",
        "workload",
        "training",
        "analysis",
        "operators",
        "checkpoint",
        "process",
    },
    "elastic": {"launch", "plan", "check", "questions"},
    "export": {"workload", "analysis", "runtime", "checkpoint"},
    "init": {"workload", "analysis", "profile"},
    "verify": {"launch", "workload", "training", "analysis", "process"},
    "simulate": {"program", "costs", "account"},
    "questions": {"plan", "costs"},
    "calibrate": {"plan", "costs", "account"},
    "report": {"plan", "check", "simulate", "costs", "account"},  # it shows what each of them says
    "watch": {"report", "launch"},
    "zoo": {"workload"},
    "overhead": {
        "workload",
        "profile",
        "plan",
        "runtime",
        "process",
    },  # a run of a toy, from profile to steps
}
# Types that are a stage's contract, and may be imported from anywhere.
CONTRACTS = {
    "plan.types",
    "plan.file",
    "profile.types",
    "profile.metagraph",
    "profile.mixed.seen",
    "program.types",
    "workload.file",
    "workload.settings.types",
}
# Packages whose import must not load torch: planning runs where there is none.
WITHOUT_TORCH = (
    "costs",
    "account",
    "profile.types",
    "plan",
    "check",
    "program",
    "show",
    "simulate",
    "questions",
    "calibrate",
    "report",
    "watch",
    "cli",
    "checkpoint.files",
    "checkpoint.index",
    "checkpoint.carry_over",
)


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name below spindle_cli, and file, of every module."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Every module of ours that a file imports, anywhere in it, as a dotted name below spindle_cli."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
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


def test_what_comments_docs_and_rules_name_exists() -> None:
    """Files whose path begins with a folder of the repository or of the package, and modules."""
    code, top = dict(modules()), ("src", "tests", "scripts", "examples")
    ours = [path for folder in top for path in ROOT.glob(f"{folder}/**/*.py")]
    paths = {"/".join(path.parts[start:]) for path in ours for start in range(1, len(path.parts))}
    first = {*top, *(path.parent.name for path in SOURCE.rglob("__init__.py"))}
    missing = []
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    for page in {*pages, *ours} - {ROOT / "tests" / "mutants" / "test_mutants.py"}:  # it makes files up
        text = page.read_text(encoding="utf-8")
        named = [f"{start}{rest}" for start, rest in _A_FILE.findall(text) if start.split("/")[0] in first]
        unknown = [name for name in named if name not in paths]
        unknown += [name for name in _A_MODULE.findall(text) if not _exists(name.split("."), code)]
        missing += [f"{page.relative_to(ROOT)}: {name}" for name in unknown]
    assert not missing, "\n".join(missing)
    assert set(code) >= {*FOR_ALL, *MAY_IMPORT, *CONTRACTS, *WITHOUT_TORCH}


_A_FILE = re.compile(r"(?<![\w./{-])(\w+/)([\w/-]+\.py)\b")
_A_MODULE = re.compile(r"\bspindle_cli\.([a-z]\w*(?:\.[a-z]\w*)*)")


def _exists(parts: list[str], code: dict[str, Path]) -> bool:
    """Whether this names a module, or what a module's text mentions."""
    end = next((end for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in code), 0)
    text = code[".".join(parts[:end])].read_text(encoding="utf-8")
    return end == len(parts) or re.search(rf"\b{parts[end]}\b", text) is not None


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
            allowed = other == package or other in MAY_IMPORT[package] | FOR_ALL or imported in CONTRACTS
            if not allowed:
                broken.append(f"{name} imports {imported}")
    assert not broken, "\n".join(broken)


def test_rooms_import_one_way_only() -> None:
    """A room is a folder inside a package; the files at a package's root count each by itself."""
    rooms = networkx.DiGraph()
    known = dict(modules())
    for name, path in known.items():
        for imported in imports_of(path) if path.name != "__init__.py" else ():
            rooms.add_edge(_room(name), _room(imported))
    rooms.remove_edges_from([(room, room) for room in rooms])
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(rooms) if len(circle) > 1]
    assert not circles


def _room(module: str) -> str:
    package, *inner = module.split(".")
    return f"{package}.{inner[0]}" if inner else package


def test_the_checker_takes_only_types_and_costs_from_planning() -> None:
    for name, path in modules():
        if name.split(".")[0] == "check":
            taken = {imported for imported in imports_of(path) if imported.startswith(("plan", "profile"))}
            assert taken <= {"plan.types", "profile.types", "profile.metagraph", "profile.mixed.seen"}, name


def test_planning_and_the_command_line_load_no_torch() -> None:
    names = [
        f"spindle_cli.{name}"
        for name, _ in modules()
        if name in WITHOUT_TORCH or name.startswith(tuple(f"{package}." for package in WITHOUT_TORCH))
    ]
    code = f"import sys\nfor name in {names!r}: __import__(name)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_help_is_instant() -> None:
    """Under 0.3 s; the processor's time is measured, since the machine may be busy with other tests, and the
    least of three, since they slow down the processor, too.
    """
    command = [sys.executable, "-m", "spindle_cli", "--help"]
    times_s = []
    for _ in range(3):
        before = os.times()
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        after = os.times()
        times_s.append(
            after.children_user - before.children_user + after.children_system - before.children_system
        )
    assert min(times_s) < 0.3


def test_help_loads_no_stage() -> None:
    code = (
        "import sys\nfrom spindle_cli.cli import app\n"
        "loaded = [m for m in sys.modules if m.startswith('spindle_cli.')]\n"
        "assert {m.split('.')[1] for m in loaded} <= {'cli', 'errors', 'process'}, loaded\n"
        "assert not {'torch', 'pydantic', 'rich.console', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_no_two_test_files_are_one_module() -> None:
    """pytest imports a file of a folder without `__init__.py` by its bare name, the first of them for all."""
    tests = Path(__file__).parent
    files = [path for path in tests.rglob("*.py") if not (path.parent / "__init__.py").exists()]
    names = Counter(path.stem for path in files if path.stem != "conftest")
    assert not {name for name, count in names.items() if count > 1}
