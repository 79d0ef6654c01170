"""`spindle sweep`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from spindle_cli.cli import output
from spindle_cli.cli.inputs import read_profile_and_cluster
from spindle_cli.cli.options import (
    AssumeSameDeviceOption,
    BatchOption,
    ClusterOption,
    JsonOption,
    ProfileArgument,
    WithoutOption,
)


def sweep(
    profile: ProfileArgument,
    cluster: ClusterOption,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="N,N,...",
            help="Numbers of devices; by default 1, 2, 4, ... up to the cluster's.",
            show_default=False,
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--price",
            min=0,
            max=1e9,  # as in cluster files
            help="Price of a device for an hour; adds each iteration's cost. By default the cluster file's.",
            show_default=False,
        ),
    ] = None,
    strategy: Annotated[
        Literal["spindle", "sequential", "distmm", "optimus", "dp-even", "dp-flops"],
        typer.Option(
            "--strategy", help="How the devices are shared out; the last two for devices of several types."
        ),
    ] = "spindle",
    without: WithoutOption = None,
    batch: BatchOption = None,
    assume_same_device: AssumeSameDeviceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan for several numbers of devices, and mark the knee.

    The first devices of the cluster are taken, node by node; beyond its size, devices are added to its last
    node. The knee is the last number of devices up to which each added device brings at least half the speed
    per device before it.
    """
    from spindle_cli.questions.edit import edited
    from spindle_cli.questions.spending import unknown
    from spindle_cli.questions.sweep import default_counts, parse_counts, sweep_table
    from spindle_cli.questions.sweep import sweep as ask

    read, goal = read_profile_and_cluster(profile, cluster, assume_same_device=assume_same_device)
    counts = default_counts(goal) if devices is None else parse_counts(devices)
    result = ask(edited(read, without or [], batch or []), goal, counts, strategy, price)
    output.report(as_json, result, sweep_table(result))
    for note in unknown(goal, price):
        output.note(note)
