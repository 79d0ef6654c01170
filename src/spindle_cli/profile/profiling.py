"""The three ways to a profile file: it is measured, estimated, or put together from others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from spindle_cli.analysis.analyse import unlisted_layers
from spindle_cli.costs.flops import Arithmetic, arithmetic_in
from spindle_cli.errors import InputError, UsageError, WorkloadError
from spindle_cli.files.artifact import write_json
from spindle_cli.files.cluster import Cluster
from spindle_cli.operators.heads.chunked import whole_losses
from spindle_cli.operators.tensor_parallel import kept_whole
from spindle_cli.operators.whole import require_compiler
from spindle_cli.process.devices import places_on_gpus, usable_cores
from spindle_cli.process.environment import chosen_threads
from spindle_cli.profile.checking.run import CheckSettings, check_numbers, with_whole
from spindle_cli.profile.estimating.estimate import EstimateSettings, estimate
from spindle_cli.profile.machine.cluster_file import write_cluster
from spindle_cli.profile.machine.devices import device_peak, require_precision
from spindle_cli.profile.machine.machine import DeviceType, describe_device, device_of_type
from spindle_cli.profile.measuring.measure import measure
from spindle_cli.profile.measuring.settings import MeasureSettings, MeasuresOverhead, Reused, shared_limits
from spindle_cli.profile.mixed.merging import merge
from spindle_cli.profile.mixed.seen import is_known_as
from spindle_cli.profile.numeric_check import NumericCheck
from spindle_cli.profile.op.stand_ins import Analysed, load_analysed
from spindle_cli.profile.op.tensor_parallel import degrees_on
from spindle_cli.profile.op.timings import Limits
from spindle_cli.profile.points import MAX_OPS
from spindle_cli.profile.types import Profile
from spindle_cli.training.callbacks import refuse_setters
from spindle_cli.training.optimizing.groups import groups_of_graph, stepped_whole
from spindle_cli.training.optimizing.schedules import TaskWeights, require_trainable
from spindle_cli.workload.file import TrainSettings, naming_the_file
from spindle_cli.workload.settings.types import Looking

# Points of a curve that are measured; a batch with more divisors has the others fitted between.
MAX_POINTS = 8
# More processes than this per core say nothing about a machine that has the cores.
_MOST_PROCESSES_PER_CORE = 4
# More than this cannot have been meant.
_MOST_ASKED_FOR_PER_CORE = 32


@dataclass(frozen=True)
class Audience:
    """Whom progress is shown to: a console for the bar, and a way to say something."""

    console: Console
    note: Callable[[str], None]


@dataclass(frozen=True)
class ProfileOptions:
    """What is asked of a profile that is measured.

    Attributes:
        cluster: curves reach to its number of devices, with one of its nodes' devices busy at once.
        device_name: what a cluster file with CPUs of several types calls those of this machine.
        nproc: measure allocations of up to so many devices on as many processes.
        threads: of each process; if None as OMP_NUM_THREADS says, or else a device's share of this machine's
            cores.
        cluster_out: where to write this machine, as measured, as a cluster file.
        time_limit_s: for one op on one share, and for messages of one size.
        max_tp: layers are also timed in parts, 2, 4 and 8 ways up to this; with a cluster, for its links.
        reuse: another profile, of which what was measured of equal ops is taken.
        accept_noise: write times of a busy machine, too.
        check: by numbers that what may be split over the batch may be.
        looking: how lengths of batches are found.
        overhead: measures the runtime, where the devices are processors that run it, too; None: it is taken
            to cost nothing.
    """

    cluster: Cluster | None = None
    device_name: str | None = None
    nproc: int | None = None
    threads: int | None = None
    cluster_out: Path | None = None
    time_limit_s: float = Limits.max_s
    max_tp: int = 1
    reuse: Path | None = None
    accept_noise: bool = False
    check: bool = True
    looking: Looking = field(default_factory=Looking)
    overhead: MeasuresOverhead | None = None


def profile_workload(source: str, out: Path, audience: Audience, options: ProfileOptions) -> Profile:
    """Measure a workload on this machine and write its profile to `out`; goes on where an interrupted run
    stopped.

    Raises:
        WorkloadError: the workload cannot be loaded or traced.
        UsageError: the options ask for devices that are not here.
        RunFailedError: a process died, an op fits the memory on no share, or the machine was too busy.
    """
    for path in (out, options.cluster_out):
        if path is not None:
            _check_writable(path)
    reused = None if options.reuse is None else Reused.read(options.reuse)
    machine = _Measured.of(options)
    folder = Path.cwd()
    analysed = load_analysed(source, folder, options.looking)
    settings = _measure_settings(options, machine, analysed.loaded.train)
    _require_sound_training(source, analysed, compiles_for=machine.device)
    _say_what_stays_whole(analysed, settings.degrees, audience)
    # As many threads as the workers have: where it is one, they may be forked, and no pool of threads be.
    checks = CheckSettings(threads=machine.threads, by_words=options.max_tp > 1) if options.check else None
    analysed = _checked(analysed, checks, audience)
    profile = measure(
        analysed,
        settings,
        folder=folder,
        out=out,
        console=audience.console,
        note=audience.note,
        reused=reused,
    )
    _say_what_is_in_chunks(profile, audience)
    if options.cluster_out is not None:
        write_cluster(options.cluster_out, profile)
    return profile


@dataclass(frozen=True)
class _Measured:
    """What of this machine is measured.

    Attributes:
        device: the kind of its devices. `called`: what cluster files call it, of CPUs, as far as that is
            said.
        type_in_cluster: the type among those of the cluster; None where nothing says it.
        processes: those that are busy at once. `threads`: of each.
    """

    device: DeviceType
    called: str | None
    type_in_cluster: str | None
    processes: int
    threads: int

    @classmethod
    def of(cls, options: ProfileOptions) -> _Measured:
        """Finds what of this machine is measured as the options ask for it.

        Raises:
            UsageError: they ask for devices or links that are not here.
        """
        cluster = options.cluster
        called = _called(cluster, options.device_name)
        device = device_of_type(called)
        processes = _num_processes(device, cluster, options.nproc)
        _require_links(options.max_tp, cluster, processes, options.cluster_out)
        return cls(
            device,
            called if device == "cpu" else None,
            called if device == "cpu" else _type_of_gpu(cluster, device),
            processes,
            options.threads or chosen_threads() or _share_of_cores(device, processes, cluster),
        )


def _measure_settings(options: ProfileOptions, machine: _Measured, train: TrainSettings) -> MeasureSettings:
    """Return how the workers measure what is trained by these settings."""
    cluster = options.cluster
    return MeasureSettings(
        device=machine.device,
        called=machine.called,
        processes=machine.processes,
        nproc=options.nproc or 1,
        threads=machine.threads,
        max_devices=machine.processes if cluster is None else cluster.num_devices,
        max_points=MAX_POINTS,
        limits=shared_limits(
            Limits(max_s=options.time_limit_s), machine.device, machine.processes, machine.threads
        ),
        degrees=tuple(
            degree for degree in degrees_on(cluster, machine.type_in_cluster) if degree <= options.max_tp
        ),
        cluster=_of_type(cluster, machine.type_in_cluster) if options.max_tp > 1 else None,
        accepts_noise=options.accept_noise,
        planned_for=cluster,
        precision=train.precision,
        compile=train.compile,
        float32_matmul=train.float32_matmul,
        loss_chunks=train.loss_chunks,
        overhead=options.overhead,
    )


def _require_sound_training(
    source: str, analysed: Analysed, *, compiles_for: DeviceType | None = None
) -> None:
    """Refuse train settings that the workload cannot be trained by, and more ops than can be planned for.

    Raises:
        WorkloadError: saying which, or how many.
    """
    train = analysed.loaded.train
    with naming_the_file(source):
        require_trainable(train)
        groups_of_graph(train, analysed.graph)
        refuse_setters(train, source, analysed.loaded.workload)
        TaskWeights(train, analysed.loaded.workload.tasks).at(0)
        if compiles_for is not None:
            require_compiler(train, compiles_for)
    count = sum(len(task.ops) for task in analysed.graph.tasks.values())
    if count > MAX_OPS:
        raise WorkloadError(
            f"{source}: {count:,} operators of all tasks together; at most {MAX_OPS:,} can be planned for",
            hint="Name classes of larger parts of the model in the workload's `operators`.",
        )


def _require_links(max_tp: int, cluster: Cluster | None, processes: int, cluster_out: Path | None) -> None:
    """Raises: UsageError: a link is asked for or needed, and there is none."""
    if max_tp > 1 and cluster is None:
        raise UsageError(
            f"--tp {max_tp}: the sums of split layers come from the links of a cluster, and none is given",
            hint="Name one with --cluster.",
        )
    if cluster_out is not None and processes == 1:
        raise UsageError(
            f"{cluster_out}: a cluster file states the link between two devices, and one process has none",
            hint="Measure with --nproc 2 or more.",
        )


def _called(cluster: Cluster | None, device_name: str | None) -> str | None:
    """Return the type of this machine's devices, as far as anybody has said."""
    if device_name is not None:
        if cluster is not None and device_name not in cluster.types:
            raise UsageError(
                f"--device {device_name}: the cluster has {', '.join(cluster.types)}",
                hint="Name the type that this machine is of.",
            )
        return device_name
    if cluster is None:
        return None
    if cluster.is_mixed and cluster.is_cpu:
        raise UsageError(
            f"the cluster has CPUs of several types: {', '.join(cluster.types)}",
            hint="Say which this machine's are: --device NAME.",
        )
    return cluster.device_type


def _type_of_gpu(cluster: Cluster | None, device: DeviceType) -> str | None:
    """Return what a cluster of several types calls this machine's GPUs; None where it says nothing of such
    ones.
    """
    if cluster is None or not cluster.is_mixed:
        return None
    here = describe_device(device, 1)
    return next((kind for kind in cluster.types if is_known_as(here, kind)), None)


def estimate_profile(
    source: str,
    out: Path,
    audience: Audience,
    *,
    cluster: Cluster | None = None,
    device_name: str | None = None,
    num_devices: int | None = None,
    precision: Arithmetic | None = None,
    check: bool = True,
    looking: Looking = Looking(),  # noqa: B008 - frozen
) -> Profile:
    """Estimate a workload's profile from published peaks and write it to `out`; nothing is run and no device
    is needed.

    Args:
        cluster: gives the devices and how many there are; curves reach to as many of each type as there are
            of all.
        device_name, num_devices: the same without a cluster; `device_name` goes before the cluster's.
        precision: of the arithmetic; if None, float16 where the train settings have it, bfloat16 on
            accelerators and where they have that, else float32.
        check: by numbers that the losses may be split over the batch.
        looking: how lengths of batches are found.

    Raises:
        WorkloadError: the workload cannot be loaded or traced.
        UsageError: neither a cluster nor a device and a number of devices are given.
        InputError: no peaks are listed for a device, or it does not have the precision.
    """
    _check_writable(out)
    names = (device_name,) if device_name else (cluster.types if cluster else ())
    count = num_devices or (cluster.num_devices if cluster else None)
    if not names or count is None:
        raise UsageError(
            "an estimate needs to know the device and how many there are",
            hint="Give --cluster CLUSTER.yaml, or --device and --nproc.",
        )
    peaks = [device_peak(name) for name in names]
    analysed = load_analysed(source, Path.cwd(), looking)
    _require_sound_training(source, analysed)
    trained_in = arithmetic_in(analysed.loaded.train.precision)
    usual = "bfloat16" if trained_in == "float32" and peaks[0].name != "cpu" else trained_in
    chosen: Arithmetic = precision or usual
    require_precision(names, chosen)
    of_types = {name: degrees_on(cluster, name) for name in names}
    _say_what_stays_whole(analysed, max(of_types.values(), key=len), audience)
    analysed = _checked(
        analysed, CheckSettings(losses_only=True, by_words=cluster is not None) if check else None, audience
    )
    made = []
    for name, peak in zip(names, peaks, strict=True):
        settings = EstimateSettings(name, peak, count, chosen, _of_type(cluster, name), of_types[name])
        made.append((out, estimate(analysed, settings, audience.console)))
    profile = made[0][1] if len(made) == 1 else merge(made)
    _say_what_is_in_chunks(profile, audience)
    write_json(out, profile)
    return profile


def merge_profiles(paths: Sequence[Path], out: Path) -> Profile:
    """Put the profiles of several types of device together in one, and write it to `out`.

    Raises:
        InputError: a profile is missing, malformed, or does not belong to the others.
    """
    made = merge([(path, Profile.read(path)) for path in paths])
    write_json(out, made)
    return made


def _of_type(cluster: Cluster | None, device: str | None) -> Cluster | None:
    """Return a cluster of several types as if all devices were of one of them; any other as it is."""
    if cluster is None or device is None or not cluster.is_mixed:
        return cluster
    return cluster.as_if_all(device)


def _checked(analysed: Analysed, settings: CheckSettings | None, audience: Audience) -> Analysed:
    """Check a workload's ops by numbers. Those that differ by shares are left whole from then on, and it is
    said.
    """
    if settings is None:
        return replace(analysed, check=NumericCheck(skipped="--no-check"))
    check = check_numbers(analysed.graph, analysed.loaded.train.seed, settings, analysed.shortest)
    for task in check.tasks:
        for name, why in task.whole.items():
            audience.note(f"{name} is not split over the batch: {why}")
    return replace(analysed, graph=with_whole(analysed.graph, check), check=check)


def _say_what_stays_whole(analysed: Analysed, degrees: tuple[int, ...], audience: Audience) -> None:
    for name, lengths in analysed.graph.lengths.items():
        audience.note(lengths.line(name))
    for line in analysed.graph.notes:
        audience.note(line)
    for line in unlisted_layers(analysed.graph):
        audience.note(line)
    if degrees:
        for line in kept_whole(analysed.graph):
            audience.note(line)
    train = analysed.loaded.train
    for line in whole_losses(analysed.graph, train.loss_chunks):
        audience.note(line)
    for line in stepped_whole(train, groups_of_graph(train, analysed.graph), analysed.graph):
        audience.note(line)


def _say_what_is_in_chunks(profile: Profile, audience: Audience) -> None:
    for metaop in profile.metaops:
        if metaop.loss_chunks:
            rows = max(metaop.loss_chunks)
            count = metaop.loss_chunks[rows]
            audience.note(
                f"{metaop.name}: its loss is computed in {count} chunks of a share of {rows} samples"
            )


def _share_of_cores(device: DeviceType, processes: int, cluster: Cluster | None) -> int:
    """Threads of each process: of CPUs as if all devices of the cluster were here, for nothing says how many
    cores its other nodes have.
    """
    devices = cluster.num_devices if cluster is not None and device == "cpu" else processes
    return max(1, usable_cores() // max(processes, devices))


def _num_processes(device: DeviceType, cluster: Cluster | None, nproc: int | None) -> int:
    """Processes busy at once: those asked for, else one per device of a node, as far as they are here."""
    available = places_on_gpus() if device == "cuda" else usable_cores()
    if nproc is not None:
        most = available if device == "cuda" else _MOST_ASKED_FOR_PER_CORE * available
        if nproc > most:
            what = (
                f"{available} CUDA devices" if device == "cuda" else f"{available} cores for {most} processes"
            )
            raise UsageError(
                f"--nproc {nproc}: this machine has {what} at most",
                hint="Without --nproc, larger allocations are composed from one device's share.",
            )
        return nproc
    if cluster is None:
        return available
    wanted = max(cluster.node_sizes)
    return min(wanted, available if device == "cuda" else _MOST_PROCESSES_PER_CORE * available)


def _check_writable(out: Path) -> None:
    """Refuse before anything is measured, not after."""
    if not out.parent.is_dir():
        raise InputError(
            f"{out}: the folder {out.parent} does not exist", hint="Make it first, or write elsewhere."
        )
    if out.is_dir():
        raise InputError(f"{out}: is a folder", hint="Name a file, for example profile.json.")
