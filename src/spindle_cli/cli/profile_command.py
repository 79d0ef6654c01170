"""`spindle profile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import BaseModel

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption, OutputOption, WorkloadArgument

if TYPE_CHECKING:
    from rich.table import Table

    from spindle_cli.profile.types import Profile


class CurveSummary(BaseModel):
    """One MetaOp of a `ProfileSummary`; errors and spread are relative, null with too few points."""

    name: str
    num_ops: int
    num_devices: list[int]
    op_s: list[float]
    spread: float | None
    leave_one_out_error: float | None
    worst_error: float | None


class ProfileSummary(BaseModel):
    """What `spindle profile --json` prints."""

    profile: str
    workload: str
    fingerprint: str
    device: str
    sources: list[str]
    metaops: list[CurveSummary]


def profile(
    workload: WorkloadArgument,
    output_path: OutputOption,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            metavar="CLUSTER.yaml",
            help="Reach to as many devices as this cluster has.",
            show_default=False,
        ),
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Compute from published peaks; runs nothing, needs no device.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            min=1,
            metavar="N",
            help="Measure on N processes, one per device, at once.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="NAME", help="With --estimate: for this device.", show_default=False
        ),
    ] = None,
    precision: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option("--precision", help="With --estimate: of the arithmetic.", show_default=False),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, metavar="N", help="Threads of each process.", show_default=False),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit", min=0.01, metavar="SECONDS", help="At most this long for one op on one share."
        ),
    ] = 0.5,
    tp: Annotated[
        int,
        typer.Option(
            "--tp",
            min=1,
            metavar="N",
            help="Also measure layers split 2, 4 and 8 ways, up to N; with --cluster.",
        ),
    ] = 1,
    write_cluster: Annotated[
        Path | None,
        typer.Option(
            "--write-cluster",
            metavar="FILE",
            help="Write this machine, as measured, as a cluster file.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure or estimate a workload's scaling curves."""
    from spindle_cli.cluster import Cluster
    from spindle_cli.errors import UsageError
    from spindle_cli.profile.profiling import Audience, estimate_profile, profile_workload
    from spindle_cli.profile.timings import Limits

    if estimate and write_cluster is not None:
        raise UsageError(
            "--write-cluster: nothing is measured with --estimate", hint="Leave out one of the two."
        )
    if not estimate and (device is not None or precision is not None):
        raise UsageError(
            "--device and --precision belong to --estimate", hint="Measured is what this machine has."
        )
    audience = Audience(output.err(), output.note)
    goal = None if cluster is None else Cluster.read(cluster)
    if estimate:
        made = estimate_profile(
            workload,
            output_path,
            audience,
            cluster=goal,
            device_name=device,
            num_devices=nproc,
            precision=precision,
        )
    else:
        limits = Limits(max_s=time_limit)
        made = profile_workload(
            workload,
            output_path,
            audience,
            cluster=goal,
            nproc=nproc,
            threads=threads,
            cluster_out=write_cluster,
            limits=limits,
            max_tp=tp,
        )
    output.note(f"wrote {output_path}")
    if write_cluster is not None:
        output.note(f"wrote {write_cluster}")
    output.report(as_json, _summary(output_path, made), _table(made))


def _summary(path: Path, made: Profile) -> ProfileSummary:
    metaops = [
        CurveSummary(
            name=metaop.name,
            num_ops=metaop.num_ops,
            num_devices=[point.num_devices for point in metaop.best_points],
            op_s=[point.op_s for point in metaop.best_points],
            spread=max((point.spread for point in metaop.curve if point.spread is not None), default=None),
            leave_one_out_error=metaop.fit.leave_one_out_error if metaop.fit else None,
            worst_error=metaop.fit.worst_error if metaop.fit else None,
        )
        for metaop in made.metaops
    ]
    return ProfileSummary(
        profile=str(path),
        workload=made.workload.name,
        fingerprint=made.workload.fingerprint,
        device=made.device.name,
        sources=sorted({point.source for metaop in made.metaops for point in metaop.curve}),
        metaops=metaops,
    )


def _table(made: Profile) -> Table:
    from rich.table import Table

    from spindle_cli.units import format_bytes, format_seconds

    table = Table(
        title=f"{made.workload.name} on {made.device.name}",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.caption = (
        "One op, forward and backward, on one device and on the most, n. Spread: interquartile range over "
        "the median, at worst. Fit: median error of the fit at a point that it does not know."
    )
    longest = max(len(metaop.name) for metaop in made.metaops)
    table.add_column("MetaOp", no_wrap=True, min_width=longest)
    for column in ("ops", "batch", "op on 1", "on n", "n", "kept/op", "spread", "fit"):
        table.add_column(column, justify="right")
    for metaop in made.metaops:
        first, last = metaop.best_points[0], metaop.best_points[-1]
        spreads = [point.spread for point in metaop.curve if point.spread is not None]
        error = metaop.fit.leave_one_out_error if metaop.fit else None
        table.add_row(
            metaop.name,
            str(metaop.num_ops),
            str(metaop.batch_size),
            format_seconds(first.op_s),
            format_seconds(last.op_s),
            str(last.num_devices),
            format_bytes(metaop.activation_bytes_per_op),
            f"{max(spreads):.0%}" if spreads else "-",
            "-" if error is None else f"{error:.0%}",
        )
    return table
