"""Take whole models of `transformers` through profile, plan and verify, and print what becomes of each.

    python scripts/try_hf_models.py [FAMILY ...] [--steps N] [--page docs/models-tried.md]

Each is made from a small configuration with nothing downloaded (scripts/hf_models/), and is a task of one
workload. That is profiled on this machine with the check by numbers, planned so that every batch that may be
split is split over two devices, and trained by that plan and in one plain process in float64. Exits with 1 if
what is taken does not train the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from hf_families import FAMILIES, build

from spindle_cli.errors import SpindleError
from spindle_cli.workload.analyse import analyse

HERE = Path(__file__).parent
CLUSTER = HERE.parent / "configs" / "clusters" / "cpu-2.yaml"
BEGIN, END = "<!-- tried: begin -->", "<!-- tried: end -->"
HEAD = (
    "| model | MetaOps; in brackets those that are not split over the batch | check by numbers |",
    "|---|---|---|",
)


@dataclass(frozen=True)
class Outcome:
    """What became of all families.

    Attributes:
        rows: a line of a table in Markdown for each family.
        taken: how many.
        verified: what verify says of all that are taken together.
    """

    rows: tuple[str, ...]
    taken: int
    verified: str
    same: bool


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--steps", type=int, default=2, help="of verify (default: %(default)s)")
    parser.add_argument("--page", type=Path, help="write the table between this page's marks")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = _try(given.families or list(FAMILIES), given.steps, Path(folder))
    lines = [*HEAD, *outcome.rows, "", _summary(outcome)]
    print("\n".join(lines))
    if given.page is not None:
        before, rest = given.page.read_text().split(BEGIN, 1)
        given.page.write_text("\n".join([before + BEGIN, *lines, END + rest.split(END, 1)[1]]))
    return 0 if outcome.same else 1


def _summary(outcome: Outcome) -> str:
    return (
        f"{outcome.taken} of {len(outcome.rows)} are taken; "
        f"`spindle verify --dtype float64` of all of them together: "
        f"{outcome.verified} (torch {torch.__version__}, transformers {transformers.__version__}, "
        f"2 processes, {datetime.now(UTC):%Y-%m-%d})."
    )


def _try(families: Sequence[str], steps: int, folder: Path) -> Outcome:
    refused = {family: message for family in families if (message := _refused(family)) is not None}
    taken = [family for family in families if family not in refused]
    workload, profile, plan = folder / "workload.yaml", folder / "profile.json", folder / "plan.yaml"
    source = {
        "schema": "spindle.workload/1",
        "model": f"{HERE / 'hf_families.py'}:build",
        "args": {"families": taken},
    }
    workload.write_text(json.dumps(source))
    _run("profile", workload, "-o", profile, "--nproc", 1, "--time-limit", 0.02, "--accept-noise")
    # Sequential plans split every batch that may be split.
    _run("plan", profile, "--cluster", CLUSTER, "-o", plan, "--strategy", "sequential")
    said = json.loads(_run("verify", plan, "--dtype", "float64", "--steps", steps, "--json", allowed=(0, 1)))
    found = json.loads(profile.read_text())
    rows = tuple(
        f"| {_title(family)} | refused: {refused[family]} | |" if family in refused else _row(family, found)
        for family in families
    )
    return Outcome(rows, len(taken), _verified(said), bool(said["same"]))


def _refused(family: str) -> str | None:
    """Why a family is not taken; None if it is."""
    try:
        analyse(build([family]))
    except SpindleError as error:
        return " ".join(str(error).split()).replace("|", "/")
    return None


def _row(family: str, profile: dict[str, Any]) -> str:
    metaops = [_described(metaop) for metaop in profile["metaops"] if metaop["task"] == family]
    (check,) = (check for check in profile["numeric_check"]["tasks"] if check["task"] == family)
    return f"| {_title(family)} | {', '.join(metaops)} | {_checked(check)} |"


def _title(family: str) -> str:
    """The first line of what makes it."""
    return str(FAMILIES[family].__doc__).split("\n")[0].rstrip(".")


def _described(metaop: dict[str, Any]) -> str:
    name = metaop["name"].split("/", 1)[1]
    text = name if metaop["num_ops"] == 1 else f"{metaop['num_ops']} x {name}"
    return text if len(metaop["curve"]) > 1 else f"[{text}]"


def _checked(check: dict[str, Any]) -> str:
    if check["whole"]:
        return f"kept whole: {', '.join(check['whole'])}"
    if check["unchecked"] or check["forward_unchecked"]:
        return f"not checked: {check['forward_unchecked'] or ', '.join(check['unchecked'])}"
    return f"differs by {check['largest_difference']:.0e}" if check["checked"] else "nothing is split"


def _verified(said: dict[str, Any]) -> str:
    worst = max(each["largest"]["relative"] or 0.0 for each in said["checks"] if each["largest"])
    if said["same"]:
        return f"the same model, to {worst:.0e}"
    failures = [failure for each in said["checks"] for failure in each["failures"]]
    return "**another model**: " + ", ".join(sorted({failure["name"] for failure in failures})[:8])


def _run(*arguments: object, allowed: tuple[int, ...] = (0,)) -> str:
    command = [sys.executable, "-m", "spindle_cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in allowed or (1 in allowed and not done.stdout):
        sys.exit(f"{arguments[0]} has ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
