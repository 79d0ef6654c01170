"""What `spindle profile` says at its end, for scripts and for people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from spindle_cli.files.artifact import Artifact

if TYPE_CHECKING:
    from rich.table import Table

    from spindle_cli.profile.types import Profile


class CurveSummary(BaseModel):
    """One MetaOp of a profile. Errors and spread are relative, null with too few points.

    Attributes:
        name: Its name.
        num_ops: How many ops it has.
        num_devices: Numbers of devices of its best allocations.
        op_s: Seconds of an op on each of these.
        spread: The largest spread of a measured point.
        leave_one_out_error: Median error of the fit at a point that it does not know.
        worst_error: Largest error of the fit at such a point.
    """

    name: str
    num_ops: int
    num_devices: list[int]
    op_s: list[float]
    spread: float | None
    leave_one_out_error: float | None
    worst_error: float | None


class ProfileSummary(Artifact):
    """What `spindle profile --json` prints.

    Attributes:
        profile: The profile file.
        workload: The workload's name.
        fingerprint: Hash of its MetaGraph.
        device: Name of the device.
        sources: How points were obtained.
        metaops: One entry for each MetaOp.
    """

    KIND: ClassVar[str] = "profile-summary"

    schema_: Annotated[Literal["spindle.profile-summary/1"], Field(alias="schema")] = (
        "spindle.profile-summary/1"
    )
    profile: str
    workload: str
    fingerprint: str
    device: str
    sources: list[str]
    metaops: list[CurveSummary]


def summarise(path: Path, made: Profile) -> ProfileSummary:
    """The profile that was written to `path`, in short."""
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


def curve_table(made: Profile) -> Table:
    """Show a profile's curves to people, in a row for each MetaOp."""
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
