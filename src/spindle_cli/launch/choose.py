"""Which folder a run gets: chosen so that no run writes over another."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from spindle_cli.errors import UsageError
from spindle_cli.files.request import workers_dir
from spindle_cli.launch.owner import Claim, living_claims, require_open
from spindle_cli.launch.run_dir import has_run

RUNS = Path("runs")


def choose_run_dir(workload: str, wanted: Path | None, *, resume: bool, node_rank: int, run: str) -> Path:
    """The folder of this node's run; it may not exist yet.

    Without `wanted`: the one that another node of this run has claimed, else the first of runs/<workload>-1,
    -2, ... that is free; to resume, the last one in which this node has a run.

    Args:
        run: of the launch, as in `Owner`.

    Raises:
        UsageError: `wanted` holds something already, or there is no run to resume.
        HeldError: another launch has the folder.
    """
    name = re.sub(r"[^\w.-]+", "-", workload) or "run"
    if resume:
        found = wanted or _last_run(name, node_rank)
        if found is None or not found.is_dir():
            raise UsageError(
                f"--resume: there is no run in {found or RUNS / (name + '-*')}",
                hint="Give the folder of the run to resume with --run-dir.",
            )
        require_open(found, run, node_rank)
        return found
    if wanted is not None:
        if wanted.exists() and not wanted.is_dir():
            raise UsageError(f"--run-dir {wanted}: it is a file, not a folder", hint="Choose another name.")
        require_open(wanted, run, node_rank)
        if not is_free(wanted, run, node_rank):
            raise UsageError(
                f"--run-dir {wanted}: there is a run in it already",
                hint="Choose another folder, or add --resume to go on with that run.",
            )
        return wanted
    joined = [folder for _, folder in _numbered(name) if _is_joined(folder, run, node_rank)]
    if joined:
        return joined[0]
    number = 1
    while not is_free(RUNS / f"{name}-{number}", run, node_rank):
        number += 1
    return RUNS / f"{name}-{number}"


def _numbered(name: str) -> list[tuple[int, Path]]:
    """The folders runs/<name>-N, by number."""
    found = ((path.name.removeprefix(f"{name}-"), path) for path in RUNS.glob(f"{glob.escape(name)}-*"))
    return sorted((int(number), path) for number, path in found if number.isdecimal() and path.is_dir())


def _last_run(name: str, node_rank: int) -> Path | None:
    """The one with the largest number: 10 comes after 9."""
    runs = [path for _, path in _numbered(name) if _has_request(path, node_rank) or has_results(path)]
    return runs[-1] if runs else None


def _has_request(run_dir: Path, node_rank: int) -> bool:
    return (workers_dir(run_dir) / f"node-{node_rank}.request.json").exists()


def has_results(run_dir: Path) -> bool:
    """Whether there is anything of a run besides what its launchers and workers say."""
    return any(path != workers_dir(run_dir) for path in run_dir.iterdir())


def is_free(run_dir: Path, run: str, node_rank: int) -> bool:
    """Whether this node may begin a run here: nobody has it, and there is nothing in it but what another node
    of this run has begun.
    """
    if _has_request(run_dir, node_rank):
        return False
    claims = [claim for claim in living_claims(run_dir) if not _is_own(claim)]
    if not all(claim.lets_in(run, node_rank) for claim in claims):
        return False
    return bool(claims) or not has_run(run_dir)


def _is_joined(run_dir: Path, run: str, node_rank: int) -> bool:
    """Whether other nodes of this run are here, and this one is not yet."""
    return bool(living_claims(run_dir)) and is_free(run_dir, run, node_rank)


def _is_own(claim: Claim) -> bool:
    return claim.owner is not None and claim.owner.is_of_this_process
