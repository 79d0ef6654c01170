"""Take whole models of `transformers` through analysis, check by numbers, profile, plan and verify.

    python scripts/try_hf_models.py [FAMILY ...] [--group NAME] [--no-verify] [--steps N]
                                    [--page docs/benchmarks/models-tried.md]

Each is made from a small configuration with nothing downloaded (scripts/hf_models/). Its ops are computed in
float64 on real samples, whole and in shares, and all together against the model's own forward: the check by
numbers that `profile` makes. Then those that are taken are the tasks of one workload, which is profiled on
this machine, planned so that every batch that may be split is split over two devices, and trained by that
plan and in one plain process in float64. Prints a table; exits with 1 if what is taken does not train the
same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from hf_families import FAMILIES, GROUPS, build

from spindle_cli.analysis.analyse import analyse
from spindle_cli.errors import SpindleError
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.profile.numeric_check import TaskCheck
from spindle_cli.workload.graph import MetaOp

HERE = Path(__file__).parent
CLUSTER = HERE.parent / "configs" / "clusters" / "cpu-2.yaml"
SAID = ("losses", "gradients of step 1", "final parameters")
VERIFIED = "`spindle verify --dtype float64`"
MOST_NAMED = 4
BEGIN, END = "<!-- tried {group}: begin -->", "<!-- tried {group}: end -->"
HEAD = (
    "| model | MetaOps; in brackets those that are not split over the batch | shares against the whole |",
    "|---|---|---|",
)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--group", choices=tuple(GROUPS), help="of families, instead of naming them")
    parser.add_argument("--no-verify", action="store_true", help="end after the check by numbers")
    parser.add_argument("--steps", type=int, default=2, help="of verify (default: %(default)s)")
    parser.add_argument("--page", type=Path, help="put the rows into this page's tables")
    given = parser.parse_args()
    families = given.families or list(FAMILIES if given.group is None else GROUPS[given.group])
    rows, taken = _checked(families)
    is_same, said = True, None
    if not given.no_verify and taken:
        with tempfile.TemporaryDirectory() as folder:
            is_same, verified = _verified(taken, given.steps, Path(folder))
        said = f"{VERIFIED} of {_named(taken)}: {verified} ({_machine()})."
    print(
        "\n".join(
            [
                *HEAD,
                *rows.values(),
                "",
                f"{len(taken)} of {len(families)} are taken ({_machine()}).",
                *([said] if said else []),
            ]
        )
    )
    if given.page is not None:
        _write(given.page, rows, said)
    return 0 if is_same else 1


def _write(page: Path, rows: dict[str, str], verified: str | None) -> None:
    """Put rows, by family, into the tables of their groups; what was said of other families stays."""
    text = page.read_text()
    for group, members in GROUPS.items():
        own = {_title(name): rows[name] for name in members if name in rows}
        if not own:
            continue
        begin, end = (mark.format(group=group) for mark in (BEGIN, END))
        before, rest = text.split(begin, 1)
        block, after = rest.split(end, 1)
        lines = block.strip().split("\n")
        known = {
            line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")
        } | own
        table = [known[title] for title in map(_title, members) if title in known]
        taken = sum("| refused: " not in row for row in table)
        kept = [line for line in lines if line.startswith(VERIFIED) and not _is_anew(line, verified)]
        kept += [verified] if verified else []
        count = f"{taken} of {len(table)} are taken ({_machine()})."
        text = "\n".join([before + begin, *HEAD, *table, "", count, *kept, end + after])
    page.write_text(text)


def _named(families: Sequence[str]) -> str:
    """Families for the line on what was verified together, those of a large group by their number."""
    if len(families) > MOST_NAMED:
        return f"{len(families)} together"
    return ", ".join(_title(family).split()[0].strip(":,") for family in families)


def _is_anew(line: str, verified: str | None) -> bool:
    """Whether a line says of the same models what was verified now."""
    return verified is not None and line.split(":")[0] == verified.split(":")[0]


def _title(family: str) -> str:
    return str(FAMILIES[family].__doc__).split("\n")[0].rstrip(".")


def _machine() -> str:
    cores = f"CPU with {os.cpu_count()} cores"
    return (
        f"{cores}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{datetime.now(UTC):%Y-%m-%d}"
    )


def _checked(families: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """A row for each family, and those that are taken."""
    rows: dict[str, str] = {}
    taken: list[str] = []
    for family in families:
        title = _title(family)
        try:
            graph = analyse(build([family]))
            (check,) = check_numbers(graph, 0, CheckSettings()).tasks
        except SpindleError as error:
            rows[family] = f"| {title} | refused: {' '.join(str(error).split()).replace('|', '/')} | |"
            continue
        taken.append(family)
        metaops = ", ".join(_described(metaop) for metaop in graph.metaops)
        rows[family] = f"| {title} | {metaops} | {_said(check)} |"
    return rows, taken


def _described(metaop: MetaOp) -> str:
    name = metaop.name.split("/", 1)[1]
    text = name if len(metaop.ops) == 1 else f"{len(metaop.ops)} x {name}"
    return f"[{text}]" if metaop.coupled else text


def _said(check: TaskCheck) -> str:
    if check.whole:
        return f"kept whole: {', '.join(check.whole)}"
    unchecked = check.forward_unchecked or ", ".join(check.unchecked)
    return f"not checked: {unchecked}" if unchecked else f"the same, to {check.largest_difference:.0e}"


def _verified(families: Sequence[str], steps: int, folder: Path) -> tuple[bool, str]:
    """Whether a plan of them as one workload trains the same model, and to which difference."""
    workload, profile, plan = folder / "workload.yaml", folder / "profile.json", folder / "plan.yaml"
    source = {
        "schema": "spindle.workload/1",
        "model": f"{HERE / 'hf_families.py'}:build",
        "args": {"families": list(families)},
        # Adam would make a step of full size of the rounding in gradients that are zero by mathematics.
        "train": {"optimizer": "SGD", "lr": 0.1},
    }
    workload.write_text(json.dumps(source))
    _run(
        "profile", workload, "-o", profile, "--nproc", 1, "--time-limit", 0.02, "--accept-noise", "--no-check"
    )
    # Sequential plans split every batch that may be split.
    _run("plan", profile, "--cluster", CLUSTER, "-o", plan, "--strategy", "sequential")
    said = json.loads(_run("verify", plan, "--dtype", "float64", "--steps", steps, "--json", allowed=(0, 1)))
    if said["same"]:
        largest = {c["what"]: c["largest"]["relative"] for c in said["checks"] if c["largest"]}
        compared = (f"{what} to {largest[what]:.0e}" for what in SAID if what in largest)
        return True, f"the same model ({', '.join(compared)})"
    failures: dict[str, Any] = {failure["name"]: None for c in said["checks"] for failure in c["failures"]}
    return False, f"**another model**: {', '.join(list(failures)[:8])}"


def _run(*arguments: object, allowed: tuple[int, ...] = (0,)) -> str:
    command = [sys.executable, "-m", "spindle_cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in allowed or (1 in allowed and not done.stdout):
        sys.exit(f"{arguments[0]} has ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
