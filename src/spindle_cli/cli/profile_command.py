"""`spindle profile`, and `spindle profile --merge`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.cli import output
from spindle_cli.cli.options import JsonOption, OutputOption
from spindle_cli.cli.profile_options import (
    AcceptNoiseOption,
    BatchesOption,
    ClusterGoalOption,
    DegreeOption,
    DeviceOption,
    EstimateOption,
    MergeOption,
    NoCheckOption,
    OptionalWorkloadArgument,
    PercentileOption,
    PrecisionOption,
    ProcessesOption,
    ReuseOption,
    ThreadsOption,
    TimeLimitOption,
    WriteClusterOption,
)
from spindle_cli.errors import UsageError

if TYPE_CHECKING:
    from spindle_cli.costs.flops import Arithmetic
    from spindle_cli.profile.profiling import ProfileOptions
    from spindle_cli.profile.types import Profile


def profile(
    output_path: OutputOption,
    workload: OptionalWorkloadArgument = None,
    merge: MergeOption = None,
    cluster: ClusterGoalOption = None,
    estimate: EstimateOption = False,
    nproc: ProcessesOption = None,
    device: DeviceOption = None,
    precision: PrecisionOption = None,
    threads: ThreadsOption = None,
    time_limit: TimeLimitOption = 0.5,
    tp: DegreeOption = 1,
    reuse: ReuseOption = None,
    no_check: NoCheckOption = False,
    write_cluster: WriteClusterOption = None,
    accept_noise: AcceptNoiseOption = False,
    batches: BatchesOption = 64,
    length_percentile: PercentileOption = 100.0,
    as_json: JsonOption = False,
) -> None:
    """Measure or estimate a workload's scaling curves.

    Or put together those of several types of device, with --merge.
    """
    from spindle_cli.files.cluster import Cluster
    from spindle_cli.overhead.measure import measure_overhead
    from spindle_cli.profile.profiling import ProfileOptions
    from spindle_cli.workload.settings.types import Looking

    if merge or workload is None:
        others = (workload, estimate, cluster, device, nproc, precision, reuse, write_cluster, threads)
        merge_profiles(merge or [], output_path, is_alone=not any(others), as_json=as_json)
        return
    if estimate:
        _refuse_what_is_for_measuring(write_cluster, reuse)
    else:
        _refuse_what_is_for_estimating(precision, device)
    _require_outputs(output_path, write_cluster, (Path(workload.partition(":")[0]), cluster, reuse))
    options = ProfileOptions(
        cluster=None if cluster is None else Cluster.read(cluster),
        device_name=device,
        nproc=nproc,
        threads=threads,
        cluster_out=write_cluster,
        time_limit_s=time_limit,
        max_tp=tp,
        reuse=reuse,
        accept_noise=accept_noise,
        check=not no_check,
        looking=Looking(batches, length_percentile),
        overhead=measure_overhead,
    )
    make = partial(_estimate, precision=precision) if estimate else _measure
    made = make(workload, output_path, options)
    output.note(f"wrote {output_path}")
    if write_cluster is not None:
        output.note(f"wrote {write_cluster}")
    _report(output_path, made, as_json)


def _refuse_what_is_for_measuring(write_cluster: Path | None, reuse: Path | None) -> None:
    """Raises: UsageError: an option is given that --estimate has no use for."""
    for option, given in (("--write-cluster", write_cluster), ("--reuse", reuse)):
        if given is not None:
            raise UsageError(
                f"{option}: nothing is measured with --estimate", hint="Leave out one of the two."
            )


def _refuse_what_is_for_estimating(precision: Arithmetic | None, device: str | None) -> None:
    """Raises: UsageError: an option is given that is for --estimate alone."""
    from spindle_cli.files.cluster import is_cpu

    if precision is not None or (device is not None and not is_cpu(device)):
        raise UsageError(
            "--precision, and --device but for CPUs, belong to --estimate",
            hint="Measured is what this machine has.",
        )


def _require_outputs(output_path: Path, write_cluster: Path | None, read: tuple[Path | None, ...]) -> None:
    """Raises: UsageError: what would be written is among the files that are read, or is another kind's."""
    from spindle_cli.files.writing import require_no_input, require_no_other

    require_no_input("-o", output_path, *read)
    require_no_other("-o", output_path, "profile")
    if write_cluster is not None:
        require_no_input("--write-cluster", write_cluster, *read)
        require_no_other("--write-cluster", write_cluster, "cluster")


def _measure(workload: str, output_path: Path, options: ProfileOptions) -> Profile:
    """Measure the curves on this machine."""
    from spindle_cli.profile.profiling import Audience, profile_workload

    return profile_workload(workload, output_path, Audience(output.err(), output.note), options)


def _estimate(
    workload: str, output_path: Path, options: ProfileOptions, precision: Arithmetic | None
) -> Profile:
    """Work the curves out from published peaks."""
    from spindle_cli.profile.profiling import Audience, estimate_profile

    return estimate_profile(
        workload,
        output_path,
        Audience(output.err(), output.note),
        cluster=options.cluster,
        device_name=options.device_name,
        num_devices=options.nproc,
        precision=precision,
        check=options.check,
        looking=options.looking,
    )


def _report(output_path: Path, made: Profile, as_json: bool) -> None:
    from spindle_cli.cli.profile_summary import curve_table, summarise

    output.report(as_json, summarise(output_path, made), curve_table(made))


def merge_profiles(paths: list[Path], output_path: Path, *, is_alone: bool, as_json: bool) -> None:
    """Put profiles together and report what they are now.

    Args:
        is_alone: nothing is given that profiling takes.

    Raises:
        UsageError: fewer than two profiles, or not alone.
        InputError: a profile is missing, malformed, or does not belong to the others.
    """
    from spindle_cli.files.writing import require_no_input, require_no_other
    from spindle_cli.profile.profiling import merge_profiles as put_together

    if not paths:
        raise UsageError("a WORKLOAD to profile is missing", hint="Name one; or profiles to --merge.")
    if not is_alone:
        raise UsageError(
            "--merge: profiles that are there are put together, and nothing is profiled",
            hint="Give --merge A.json --merge B.json -o BOTH.json alone.",
        )
    if len(paths) < 2:
        raise UsageError("--merge: one profile; expected two or more", hint="Repeat it: --merge A --merge B.")
    require_no_input("-o", output_path, *paths)
    require_no_other("-o", output_path, "profile")
    made = put_together(paths, output_path)
    output.note(f"wrote {output_path}")
    _report(output_path, made, as_json)
