"""The steps of a check, what is worth most first: each has its own limit, and gives lines of the table."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from gpu_bench.commands import (
    ROOT,
    SCRIPTS,
    CommandFailedError,
    Commands,
    NotReachedError,
    found_in,
)
from gpu_bench.record import Line, Status, curve_lines, memory_line, time_line
from spindle_cli.files.artifact import write_json
from spindle_cli.files.request import RunRequest
from spindle_cli.files.run_files import PREDICTED_FILE, PredictedVsMeasured
from spindle_cli.files.writing import write_text
from spindle_cli.plan.types import Plan
from spindle_cli.process.environment import RANKS_PER_GPU_VARIABLE
from spindle_cli.profile.types import Profile
from spindle_cli.units import GIB

MEMORY_STEPS, TIMED_STEPS, VERIFIED_STEPS = 3, 8, 2
# Variants that are looked at together where there are cores for them; their times are not looked at.
AT_ONCE, CORES_EACH = 6, 2
# Losses of a run that was interrupted, against one that was not.
SAME_LOSS = 1e-4
# Of a plan's peak: little enough that some ops are recomputed, or moved to host memory.
TIGHT = 0.85
WORKLOADS = SCRIPTS / "gpu_bench" / "workloads.py"


@dataclass(frozen=True)
class Subject:
    """A workload and how it is trained. `source`: a file of configs/workloads, or `function` of workloads.py,
    with `arguments`; `train`: settings beside, or in place of, its own.
    """

    source: str
    train: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Its workload file."""
        write_text(path, yaml.safe_dump(self.content()))
        return path

    def content(self) -> dict[str, Any]:
        """What its workload file says."""
        known = ROOT / "configs" / "workloads" / f"{self.source}.yaml"
        content: dict[str, Any] = {
            "schema": "spindle.workload/1",
            "model": f"{WORKLOADS}:{self.source}",
            "args": dict(self.arguments),
            "train": {"optimizer": "AdamW", "lr": 1e-4, "steps": 20, "seed": 0},
        }
        if known.exists():
            content = yaml.safe_load(known.read_text(encoding="utf-8"))
        content["train"] = {**content.get("train", {}), **self.train}
        return content


@dataclass(frozen=True)
class Variant:
    """A training that is compared with plain PyTorch. `shards`: a level for all its parameters. `tight`: on
    devices with that share of the memory that a plan takes by itself, and a link to the host's memory.
    """

    name: str
    subject: Subject
    ranks: int = 1
    plan: tuple[str, ...] = ()
    profile: tuple[str, ...] = ()
    shards: str | None = None
    tight: bool = False


@dataclass(frozen=True)
class Machine:
    """The device: what torch, cluster files and its driver call it, and its memory."""

    kind: str
    name: str
    memory_bytes: int
    said: str

    @classmethod
    def read(cls, out: str) -> Machine:
        """What `gpu_bench.machine describe` printed, last of all."""
        return cls(**json.loads(out.strip().splitlines()[-1]))

    def write_cluster(self, path: Path, devices: int = 1, memory_bytes: float | None = None) -> Path:
        """A cluster file of so many ranks, which share the device."""
        link = {"latency_us": 10, "bandwidth_gb_per_s": 100}
        memory = self.memory_bytes / devices if memory_bytes is None else memory_bytes
        cluster = {
            "schema": "spindle.cluster/1",
            "name": "here",
            "nodes": [{"devices": devices, "device": self.name, "memory_gib": round(memory / GIB, 4)}],
            "links": {"intra_node": link, "inter_node": link, "host": {**link, "bandwidth_gb_per_s": 25}},
        }
        write_text(path, yaml.safe_dump(cluster))
        return path


Find = Callable[[Commands, Path], Iterator[Line]]


@dataclass(frozen=True)
class Step:
    """Part of a check. `limit_s`: of all its commands together."""

    section: str
    subject: str
    limit_s: float
    find: Find


def guarded(section: str, subject: str, find: Callable[[], Iterator[Line]]) -> Iterator[Line]:
    """What was found; a line that says so where a command failed or the time was up."""
    try:
        yield from find()
    except NotReachedError as error:
        yield Line(section, subject, "not reached", str(error), {})
    except CommandFailedError as error:
        yield Line(section, subject, "failed", str(error), {})


def taken(commands: Commands, folder: Path, step: Step) -> Iterator[Line]:
    """A step's lines, inside its time."""
    own = folder / f"{step.section}-{step.subject}".replace("/", "-").replace(" ", "-")
    own.mkdir()
    with commands.step(f"{step.section} {step.subject}", step.limit_s):
        yield from guarded(step.section, step.subject, lambda: step.find(commands, own))


def probe(section: str, *arguments: str) -> Find:
    """What a probe of the device prints; what it had printed counts, however it ends."""

    def find(commands: Commands, _: Path) -> Iterator[Line]:
        ended: Exception | None = None
        try:
            out = commands.python("-m", *arguments, folder=SCRIPTS)
        except (CommandFailedError, NotReachedError) as error:
            out, ended = error.out, error
        found = list(found_in(out))
        for each in found:
            values = {"seconds": float(each["seconds"])}
            yield Line(section, str(each["probe"]), each["status"], str(each["said"]), values)
        if ended is not None and all(each["status"] == "ok" for each in found):
            raise ended

    return find


def gpu_tests(commands: Commands, *arguments: str, subject: str = "tests/gpu", **more: Any) -> Iterator[Line]:
    """The tests that need a GPU; all are skipped where there is none. Without the options of our own
    environment, whose plugins are not on every machine.
    """
    ended: Exception | None = None
    try:
        out = commands.python("-m", "pytest", "-v", "-rs", "-o", "addopts=", "tests/gpu", *arguments, **more)
    except (CommandFailedError, NotReachedError) as error:
        out, ended = error.out, error
    found = dict(re.findall(r"^(tests/gpu/\S+) (PASSED|FAILED|ERROR|SKIPPED)\b", out, re.MULTILINE))
    failed = [name.rpartition("::")[2] for name, how in found.items() if how in ("FAILED", "ERROR")]
    counts = {how: list(found.values()).count(how.upper()) for how in ("passed", "skipped")}
    said = ", ".join(f"{number} {how}" for how, number in counts.items() if number)
    if failed:
        yield Line("tests", subject, "failed", f"{said}; failed: {', '.join(failed)}", {})
    elif ended is not None:
        if said:
            yield Line("tests", subject, "ok", f"{said}, then it ended", {})
        raise ended
    else:
        status: Status = "ok" if counts["passed"] else "skipped"
        yield Line("tests", subject, status, said or "none was run", {})


def sanitized(commands: Commands, _: Path) -> Iterator[Line]:
    """Those with streams of their own, while torch watches which stream uses what."""
    yield from gpu_tests(
        commands,
        "-k",
        "offload or batch_copies",
        subject="streams, sanitized",
        variables={"TORCH_CUDA_SANITIZER": "1"},
    )


def variants(machine: Machine, subjects: Sequence[Variant], section: str) -> Find:
    """Several variants, some at a time; each in the time of the step."""

    def find(commands: Commands, folder: Path) -> Iterator[Line]:
        several = (os.cpu_count() or 1) // CORES_EACH
        with ThreadPoolExecutor(max(1, min(AT_ONCE, several))) as pool:

            def look(number: int, variant: Variant) -> list[Line]:
                own = folder / str(number)
                own.mkdir()
                with commands.beside(f"{section} {variant.name}") as ours:
                    find = partial(verified, ours, own, machine, variant, section)
                    return list(guarded(section, variant.name, find))

            for lines in [pool.submit(look, *each) for each in enumerate(subjects)]:
                yield from lines.result()

    return find


def verified(
    commands: Commands, own: Path, machine: Machine, variant: Variant, section: str
) -> Iterator[Line]:
    """A plan's training against plain PyTorch."""
    planned(commands, own, machine, variant, 0.01)
    arguments = ("--steps", str(VERIFIED_STEPS), "--no-randomness", "--json")
    try:
        out = commands.spindle("verify", own / "plan.yaml", *arguments, variables=_ranks(variant))
    except CommandFailedError as error:
        if not error.out.lstrip().startswith("{"):
            raise
        out = error.out  # it says how they differ
    report = json.loads(out)
    found = [check["largest"]["relative"] for check in report["checks"] if check["largest"]]
    largest = max((each for each in found if each is not None), default=0.0)
    said = f"{report['steps']} steps, largest relative difference {largest:.1e}; {_described(own)}"
    yield Line(section, variant.name, "ok" if report["same"] else "failed", said, {"largest": largest})


def _described(own: Path) -> str:
    """What a plan does that a variant is there for."""
    plan = Plan.read(own / "plan.yaml")
    text = (own / "plan.yaml").read_text(encoding="utf-8")
    words = {"recompute": ":", "offload": ":", "tp": ": ([2-9]|[0-9]{2})", "sharding": ":"}
    marks = [word for word, behind in words.items() if re.search(rf"\b{word}{behind}", text)]
    return f"{plan.cluster.num_devices} devices, plan with {', '.join(marks) or 'whole ops'}"


def _ranks(variant: Variant) -> dict[str, str]:
    return {} if variant.ranks == 1 else {RANKS_PER_GPU_VARIABLE: str(variant.ranks)}


def planned(commands: Commands, own: Path, machine: Machine, variant: Variant, limit_s: float) -> None:
    """A profile measured on the device, and the plan."""
    profile, plan = own / "profile.json", own / "plan.yaml"
    source = variant.subject.write(own / "workload.yaml")
    cluster = machine.write_cluster(own / "cluster.yaml", variant.ranks)
    limits = ("--nproc", "1", "--time-limit", str(limit_s), "--no-check", "--accept-noise")
    more: tuple[str | Path, ...] = ("--cluster", cluster, *variant.profile) if variant.profile else ()
    sharing = variant.ranks if machine.kind == "cuda" else 1  # devices are as many on a CPU as asked for
    key = json.dumps([variant.subject.content(), sharing, variant.profile, limit_s], sort_keys=True)

    def measured() -> str:
        commands.spindle("profile", source, "-o", profile, *limits, *more, variables=_ranks(variant))
        return profile.read_text(encoding="utf-8")

    write_text(profile, commands.once(key, measured))  # of that workload file, which is another's then
    options = list(variant.plan)
    if variant.shards is not None:
        keys = {metaop.parameters for metaop in Profile.read(profile).metaops if metaop.parameters}
        for key in sorted(keys):
            options += ["--shard", f"{key}={variant.shards}"]
    commands.spindle("plan", profile, "--cluster", cluster, "-o", plan, *options)
    if variant.tight:
        peak = max(Plan.read(plan).predicted.peak_memory_bytes)
        cluster = machine.write_cluster(own / "tight.yaml", variant.ranks, TIGHT * peak)
        commands.spindle("plan", profile, "--cluster", cluster, "-o", plan, *options)


def resumed(machine: Machine) -> Find:
    """A run on two ranks that drops what it draws; and one that is interrupted, and goes on from its last
    checkpoint with the losses of the first.
    """

    def find(commands: Commands, own: Path) -> Iterator[Line]:
        variant = Variant("checkpoint and resume", NOISY, ranks=2)
        planned(commands, own, machine, variant, 0.01)

        def losses(folder: Path, *runs: tuple[str, ...]) -> dict[int, float]:
            for arguments in runs:
                run = (own / "plan.yaml", "--run-dir", folder, "--checkpoint-every", "2")
                commands.spindle("launch", *run, *arguments, variables=_ranks(variant))
            lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            return {line["step"]: line["loss"] for line in map(json.loads, lines)}

        whole_run = losses(own / "whole", ("--steps", "6"))
        found = losses(own / "run", ("--steps", "4"), ("--steps", "6", "--resume"))
        off = max((abs(found.get(step, 0.0) / loss - 1) for step, loss in whole_run.items()), default=1.0)
        same = list(found) == list(whole_run) == list(range(1, 7)) and off <= SAME_LOSS
        status: Status = "ok" if same else "failed"
        said = f"steps {', '.join(map(str, found))}, losses {off:.1e} off those of a run without a break"
        yield Line("two ranks", variant.name, status, said, {"largest": off})

    return find


def whole(machine: Machine, name: str, subject: Subject, limit_s: float) -> Find:
    """A workload on one device, as predicted and as measured: its ops, its iteration, its memory."""

    def find(commands: Commands, own: Path) -> Iterator[Line]:
        variant = Variant(name, subject)
        planned(commands, own, machine, variant, limit_s)
        yield from curve_lines(name, machine.name, Profile.read(own / "profile.json"))
        yield from guarded("time", name, lambda: timed(commands, own, name))
        yield from guarded("memory", name, lambda: memory(commands, own, name))

    return find


def timed(commands: Commands, own: Path, name: str) -> Iterator[Line]:
    """The iteration, trained by the plan."""
    require_plan(own)
    run_dir = own / "run"
    commands.spindle("launch", own / "plan.yaml", "--run-dir", run_dir, "--steps", str(TIMED_STEPS))
    iteration = PredictedVsMeasured.read(run_dir / PREDICTED_FILE).iteration
    yield time_line(name, iteration.predicted_s, iteration.measured_s)


def memory(commands: Commands, own: Path, name: str) -> Iterator[Line]:
    """The device's fullest moment."""
    require_plan(own)
    plan = Plan.read(own / "plan.yaml")
    folder = own / "memory"
    (folder / "workers").mkdir(parents=True)
    request = RunRequest(
        plan=own / "plan.yaml",
        workload=str(own / "workload.yaml"),
        steps=MEMORY_STEPS,
        run_dir=folder,
        device_type="cpu" if plan.cluster.is_cpu else "cuda",
        backend=plan.cluster.talks_by,
    )
    write_json(folder / "request.json", request)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", f"--log-dir={folder}")
    commands.python(*launcher, "-m", "gpu_bench.rank", folder / "request.json", folder=SCRIPTS)
    measured = int((folder / "peak.0").read_text(encoding="utf-8"))
    yield memory_line(name, plan.predicted.peak_memory_bytes[0], measured)


def raced(machine: Machine, subject: Subject, steps: int, trace: Path) -> Find:
    """A plain loop, training by a plan, and by one with compiled layers: seconds and FLOP/s of a step."""

    def find(commands: Commands, own: Path) -> Iterator[Line]:
        for number, (way, train) in enumerate(
            {"spindle": {}, "spindle, inductor": {"compile": True}}.items()
        ):
            folder = own / str(number)
            folder.mkdir()
            chosen = Subject(subject.source, {**subject.train, **train}, subject.arguments)
            planned(commands, folder, machine, Variant(way, chosen), 0.1)
            flops = flops_of(Profile.read(folder / "profile.json"))
            if number == 0:
                out = commands.python(
                    "-m",
                    "gpu_bench.plain",
                    folder / "workload.yaml",
                    machine.kind,
                    str(steps),
                    "--trace",
                    trace,
                    folder=SCRIPTS,
                )
                for each in found_in(out):
                    yield _speed_line("plain loop", float(each["seconds"]), flops)
            run_dir = folder / "run"
            commands.spindle("launch", folder / "plan.yaml", "--run-dir", run_dir, "--steps", str(steps))
            iteration = PredictedVsMeasured.read(run_dir / PREDICTED_FILE).iteration
            yield _speed_line(way, iteration.measured_s, flops)

    return find


def flops_of(profile: Profile) -> float:
    """Of an iteration, both passes."""
    return 3.0 * sum((metaop.flops_per_op or 0.0) * metaop.num_ops for metaop in profile.metaops)


def _speed_line(way: str, seconds: float, flops: float) -> Line:
    rate = flops / seconds
    said = f"{seconds * 1e3:.1f} ms a step, {rate / 1e12:.1f} TFLOP/s"
    return Line("stack", way, "ok", said, {"seconds": seconds, "flops_per_s": rate})


def require_plan(own: Path) -> None:
    """What follows from a plan is not reached without it.

    Raises:
        NotReachedError: there is none.
    """
    if not (own / "plan.yaml").exists():
        raise NotReachedError


# Of steps; `whole` gives the lines of the table's `curve`, `time` and `memory`.
SECTIONS = ("machine", "kernels", "tests", "ranks", "two ranks", "verify", "whole", "stack")
NOISY = Subject("noisy")
ONE_RANK = (
    Variant("dropout", NOISY),
    Variant("bf16 autocast", Subject("digits", {"precision": "bf16-autocast"})),
    Variant("fp16 autocast", Subject("noisy", {"precision": "fp16-autocast"})),
    Variant("bf16", Subject("noisy", {"precision": "bf16"})),
    Variant("compiled", Subject("noisy", {"compile": True})),
    Variant("recomputed", Subject("llama-laptop"), plan=("--no-offload",), tight=True),
    Variant("offloaded", Subject("llama-laptop"), plan=("--offload",), tight=True),
    Variant("evaluated every step", Subject("noisy", {"eval_every": 1})),
    Variant("loader's workers", Subject("noisy", {"loader": {"workers": 2}})),
    Variant("digits", Subject("digits")),
    Variant("clip-4-laptop", Subject("clip-4-laptop")),
    Variant("ofasys-4-laptop", Subject("ofasys-4-laptop")),
    Variant("qwen-val-laptop", Subject("qwen-val-laptop")),
)
WHOLE_BATCHES = ("--strategy", "sequential")
TWO_RANKS = (
    Variant("data parallel, ZeRO-1", NOISY, 2, WHOLE_BATCHES),
    Variant("digits, spindle", Subject("digits"), 2),
    Variant("clip-4-laptop, spindle", Subject("clip-4-laptop"), 2),
    Variant("ZeRO-2", NOISY, 2, WHOLE_BATCHES, shards="gradients"),
    Variant("ZeRO-3", NOISY, 2, WHOLE_BATCHES, shards="parameters"),
    Variant("tp 2", Subject("llama-laptop"), 2, profile=("--tp", "2")),
    Variant("bf16 autocast", Subject("digits", {"precision": "bf16-autocast"}), 2),
    Variant("fp16 autocast", Subject("noisy", {"precision": "fp16-autocast"}), 2),
    Variant("no sharing", Subject("noisy", {"shard_optimizer": False}), 2),
)
BF16 = {"precision": "bf16-autocast"}


def steps_of(machine: Machine, size: str, trace: Path) -> Iterator[Step]:
    """All of it, what says most first."""
    kind, is_full = machine.kind, size == "full"
    one, two = (ONE_RANK, TWO_RANKS) if is_full else (ONE_RANK[:1], TWO_RANKS[:1])
    yield Step("machine", kind, 60, probe("machine", "gpu_bench.machine"))
    yield Step("kernels", kind, 60, probe("kernels", "gpu_bench.kernels", kind))
    yield Step("tests", "tests/gpu", 120, lambda commands, _: gpu_tests(commands))
    yield Step("ranks", "operations", 30, probe("ranks", "gpu_bench.ranks", "operations", kind))
    yield Step("two ranks", "against plain PyTorch", 110, variants(machine, two, "two ranks"))
    yield Step("verify", "against plain PyTorch", 110, variants(machine, one, "verify"))
    bf16, float32 = ("llama-300m bf16", Subject("llama-300m", BF16)), ("llama-300m", Subject("llama-300m"))
    if not is_full:
        bf16 = ("noisy", NOISY)
    limit_s = 0.1 if is_full else 0.01
    yield Step("whole", bf16[0], 90, whole(machine, *bf16, limit_s))
    yield Step("ranks", "lost", 75, probe("ranks", "gpu_bench.ranks", "lost", kind))
    yield Step("two ranks", "resume", 60, resumed(machine))
    toy = {"width": 64, "layers": 2, "tokens": 16, "samples": 4}
    stack = Subject("stack", BF16, {} if is_full else toy)
    yield Step("stack", "of wide layers", 100, raced(machine, stack, 10 if is_full else 4, trace))
    if is_full:
        yield Step("whole", float32[0], 90, whole(machine, *float32, limit_s))
    yield Step("ranks", "groups", 40, probe("ranks", "gpu_bench.ranks", "groups", kind))
    if is_full:
        yield Step("tests", "streams, sanitized", 60, sanitized)
        four = probe("ranks", "gpu_bench.ranks", "operations", kind, "--ranks", "4")
        yield Step("ranks", "four", 30, four)
