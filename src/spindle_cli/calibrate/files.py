"""What calibrating reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from spindle_cli.calibrate.links import with_slower_links
from spindle_cli.calibrate.run import Calibrated
from spindle_cli.errors import InputError, UsageError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.run_files import PLAN_FILE, PREDICTED_FILE
from spindle_cli.files.runs.timeline import TIMELINE_FILE
from spindle_cli.files.writing import require_no_input, require_no_other, write_text


def require_outputs(runs: Sequence[Path], profile: Path, output: Path, cluster: Path | None) -> None:
    """Refuse to write over what is read, but for the profile where the output is named as it is; and a run
    that is given twice.

    Raises:
        UsageError: one of these.
    """
    own = [run / name for run in runs for name in (PLAN_FILE, PREDICTED_FILE, TIMELINE_FILE)]
    is_profile = output.absolute() == profile.absolute()
    require_no_input("-o", output, *own, *(() if is_profile else (profile,)))
    require_no_other("-o", output, "profile")
    if cluster is not None:
        require_no_input("--write-cluster", cluster, *own, profile, output)
        require_no_other("--write-cluster", cluster, "cluster")
        if cluster.absolute() == output.absolute():
            raise UsageError(
                f"--write-cluster {cluster}: -o names the same file", hint="Give one of them another name."
            )
    known: set[Path] = set()
    for run in runs:
        if run.resolve() in known:
            raise UsageError(f"{run}: this run is given twice", hint="Give each run once.")
        known.add(run.resolve())


def write_calibrated(made: Calibrated, output: Path, cluster: Path | None) -> None:
    """Write the profile, and the cluster if one is wanted, each whole or not at all.

    Raises:
        InputError: a file cannot be written; or the runs are of several clusters, or have seen nothing move.
    """
    text = None if cluster is None else _cluster_text(made)
    write_json(output, made.profile)
    if cluster is not None and text is not None:
        write_text(cluster, text)


def _cluster_text(made: Calibrated) -> str:
    cluster = made.runs[0].plan.cluster
    for run in made.runs[1:]:
        if run.plan.cluster != cluster:
            raise InputError(
                f"--write-cluster: {made.runs[0].folder} ran on {cluster.name!r}, and {run.folder} on "
                f"{run.plan.cluster.name!r} or over other links",
                hint="Give runs of plans for one and the same cluster file.",
            )
    if not made.link_times:
        raise InputError(
            "--write-cluster: nothing was seen to move over any link in the last steps of these runs",
            hint="Run with `spindle launch --trace FILE.json`, which notes when sums end; or leave it out.",
        )
    data = with_slower_links(cluster, made.link_times).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    seen = ", ".join(f"{kind} {times:.4g}" for kind, times in sorted(made.link_times.items()))
    head = f"Calibrated by runs; times as long as before: {seen}."
    return f"# {head}\n{yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)}"
