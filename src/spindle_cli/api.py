"""`spindle_cli.profile(...)` and `spindle_cli.plan(...)`: what the commands of these names do."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spindle_cli.errors import UsageError
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.types import Plan, StrategyName
from spindle_cli.profile.types import Profile
from spindle_cli.workload.settings.types import Looking

if TYPE_CHECKING:
    from spindle_cli.workload.types import Workload

WorkloadSource = str | Path | Callable[..., "Workload"]


def profile(
    workload: WorkloadSource,
    out: str | Path | None = None,
    *,
    cluster: str | Path | Cluster | None = None,
    estimate: bool = False,
    nproc: int | None = None,
    threads: int | None = None,
    tp: int = 1,
    time_limit: float = 0.5,
    check: bool = True,
    accept_noise: bool = False,
    batches: int = 64,
    length_percentile: float = 100.0,
) -> Profile:
    """Measure, or estimate, a workload's scaling curves.

    Args:
        workload: its file, `'package.module:function'`, `'path/to/file.py:function'`, or such a function
            without arguments. Workers build it again from there, so a Workload itself will not do.
        out: where to write the profile; None: nowhere.
        cluster: to plan for: curves reach to its number of devices.
        estimate: from published peaks, without running anything.
        nproc, threads, tp, time_limit, check, accept_noise, batches, length_percentile: as the options of
            `spindle profile`.

    Raises:
        WorkloadError: the workload cannot be loaded or traced.
        UsageError: devices are asked for that are not here, or the workload has no place to be found again.
        InputError: a file is missing or malformed, or cannot be written.
        RunFailedError: a process died, or the machine was too busy.
    """
    from rich.console import Console

    from spindle_cli.overhead.measure import measure_overhead
    from spindle_cli.profile.profiling import Audience, ProfileOptions, estimate_profile, profile_workload

    console = Console(stderr=True)
    audience = Audience(console, console.print)
    source, goal = source_of(workload), _cluster(cluster)
    looking = Looking(batches, length_percentile)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json" if out is None else Path(out)
        if estimate:
            return estimate_profile(
                source, path, audience, cluster=goal, num_devices=nproc, check=check, looking=looking
            )
        options = ProfileOptions(
            cluster=goal,
            nproc=nproc,
            threads=threads,
            time_limit_s=time_limit,
            max_tp=tp,
            accept_noise=accept_noise,
            check=check,
            looking=looking,
            overhead=measure_overhead,
        )
        return profile_workload(source, path, audience, options)


def plan(
    profile: str | Path | Profile,
    cluster: str | Path | Cluster,
    out: str | Path | None = None,
    *,
    strategy: StrategyName = "spindle",
    effort: int = 1,
    micro_batches: Mapping[str, int] | None = None,
    sharding: Mapping[str, Literal["none", "optimizer", "gradients", "parameters-kept", "parameters"]]
    | None = None,
    equal_shares: bool = False,
    offload: bool | None = None,
    sums: Literal["auto", "dense", "rows", "factors"] = "auto",
    assume_same_device: bool = False,
) -> Plan:
    """Plan a profiled workload for a cluster; same inputs, same plan.

    Args:
        out: where to write the plan; None: nowhere.
        strategy, effort, equal_shares, offload, sums, assume_same_device: as the options of `spindle plan`.
        micro_batches: into how many parts tasks' batches are cut; None: as memory asks for.
        sharding: by key of parameters, what the devices that hold them share out, optimizer state alone where
            nothing is said; None: as memory asks for.

    Raises:
        NoPlanError: nothing fits the devices' memory or the valid allocations.
        UsageError: there is no such task, key of parameters, or level.
        InputError: a file is missing or malformed, or profile and cluster are of different devices.
    """
    from spindle_cli.check.run import check_plan
    from spindle_cli.plan.best.request import levels_of
    from spindle_cli.plan.file import write_plan
    from spindle_cli.plan.make import make_plan
    from spindle_cli.profile.metagraph import require_equal_batches
    from spindle_cli.profile.mixed.seen import require_same_device

    read, goal = profile if isinstance(profile, Profile) else Profile.read(Path(profile)), _cluster(cluster)
    assert goal is not None, "a cluster was given"
    require_equal_batches(read.metaops, Path("profile") if isinstance(profile, Profile) else Path(profile))
    if not assume_same_device:
        require_same_device(read, goal)
    levels = None if sharding is None else levels_of(sharding)
    made = make_plan(
        read,
        goal,
        strategy,
        effort,
        micro_batches,
        levels,
        equal_shares=equal_shares,
        offload=offload,
        sums=sums,
    )
    violations = check_plan(made, read)
    assert not violations, "the planner broke a rule: " + "; ".join(map(str, violations))
    if out is not None:
        write_plan(Path(out), made)
    return made


def source_of(workload: Any) -> str:
    """The text that names a workload, by which others find it.

    Raises:
        UsageError: there is none.
    """
    if isinstance(workload, str | Path):
        return str(workload)
    if inspect.isfunction(workload) and workload.__qualname__ == workload.__name__ != "<lambda>":
        return f"{inspect.getfile(workload)}:{workload.__name__}"
    raise UsageError(
        f"workload: found a {type(workload).__name__}, expected a workload file, 'path/to/file.py:function', "
        "or a function at the top of a file",
        hint="Workers build the workload again: give the function that returns it.",
    )


def _cluster(cluster: str | Path | Cluster | None) -> Cluster | None:
    return cluster if cluster is None or isinstance(cluster, Cluster) else Cluster.read(Path(cluster))
