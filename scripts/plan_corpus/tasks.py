"""Profiles made from a few numbers: tasks of transformer layers, timed by a formula.

A layer takes its floating-point operations at a share of the device's peak, a constant for starting it, and
where tensor parallelism splits it, the sums of its outputs inside a node. The same numbers give the same
profile everywhere, to the last digit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spindle_cli.costs.flops import Arithmetic
from spindle_cli.profile.batch_sums import BatchSum, Matrix
from spindle_cli.profile.machine.devices import device_peak
from spindle_cli.profile.types import CurvePoint, Device, MetaOpProfile, Profile, ShareTime, WorkloadRef
from spindle_cli.units import GIB
from spindle_cli.workload.settings.types import LocalSgd, TaskShare

ARITHMETIC: Arithmetic = "float16"  # that all types of device have
WIDTH = 2  # bytes of an element
BUSY_SHARE = 0.55  # of the published peak
START_S = 176.550117e-6  # of a layer
SPLIT_START_S = 80e-6 / 3  # more where tensor parallelism splits it
SPLIT_BYTES_PER_S = 60e9  # that its groups sum
KEPT = 34 / 16  # bytes of activations for each of the output
DEGREES = (2, 4, 8)
SMALL_SHARES = 16  # every size up to this is timed
LOSS_WIDTH = 1024  # of what contrastive losses compare


@dataclass(frozen=True)
class Part:
    """Layers of one component in one task.

    Attributes:
        component: tasks that name the same one share its parameters.
        width, tokens, ops: of each layer, of a sample, and how many layers.
        inputs: components of the same task that it takes from.
        is_decoder: whether every layer takes from them.
        words: of an embedding before its first layer.
        experts: of each layer, one of which runs each token.
        is_loss: whether it compares all samples of a batch with each other, in one op without parameters.
    """

    component: str
    width: int
    tokens: int
    ops: int
    inputs: tuple[str, ...] = ()
    is_decoder: bool = False
    words: int = 0
    experts: int = 0
    is_loss: bool = False

    @property
    def output_bytes(self) -> int:
        """Of a sample."""
        return WIDTH * self.tokens * self.width

    @property
    def flops(self) -> int:
        """Of a layer's forward pass on a sample."""
        return 24 * self.tokens * self.width**2 + 4 * self.tokens**2 * self.width


@dataclass(frozen=True)
class TaskWork:
    """A task: its batch, and the parts of its model, each behind those that it takes from."""

    name: str
    batch: int
    parts: tuple[Part, ...]


def profile_of(
    name: str,
    tasks: Iterable[TaskWork],
    types: Sequence[str] = ("a800-80gb",),
    *,
    most_devices: int = 64,
    is_sharded: bool = True,
    task_sets: Mapping[tuple[str, ...], float] | None = None,
    islands: int | None = None,
) -> Profile:
    """The profile of some tasks on some types of device.

    Args:
        most_devices: that curves go up to.
        is_sharded: whether the optimizer's state is shared out.
        task_sets: tasks that run at the same step, and at which share of the steps.
        islands: of devices that average now and then alone.
    """
    devices = tuple(
        Device(type=device, name="imagined", memory_bytes=round(device_peak(device).memory_bytes / GIB) * GIB)
        for device in types
    )
    return Profile(
        workload=WorkloadRef(name=name, fingerprint=f"sha256:{0:064d}", source="corpus"),
        device=devices[0],
        devices=devices if len(devices) > 1 else (),
        environment={"precision": ARITHMETIC},
        metaops=tuple(_metaop(task, part, types, most_devices) for task in tasks for part in task.parts),
        optimizer_state_sharded=is_sharded,
        task_sets=tuple(TaskShare(tasks=names, share=share) for names, share in (task_sets or {}).items()),
        local_sgd=None if islands is None else LocalSgd(islands=islands, every=16),
    )


def _metaop(task: TaskWork, part: Part, types: Sequence[str], most_devices: int) -> MetaOpProfile:
    named = tuple(types) if len(types) > 1 else (None,)
    inputs = tuple(f"{task.name}/{other}" for other in part.inputs)
    common = {
        "name": f"{task.name}/{part.component}",
        "task": task.name,
        "num_ops": part.ops,
        "batch_size": task.batch,
        "inputs": inputs,
        "inputs_of_every_op": inputs if part.is_decoder else (),
        "curve": tuple(
            point
            for device, label in zip(types, named, strict=True)
            for point in _curve(task.batch, part, device, label, most_devices)
        ),
        "shares": tuple(
            share
            for device, label in zip(types, named, strict=True)
            for share in _shares(task.batch, part, device, label)
        ),
    }
    if part.is_loss:
        compared = BatchSum(
            kind="gather", num_bytes=2 * WIDTH * task.batch * LOSS_WIDTH, forward=2, backward=2
        )
        return MetaOpProfile(
            **common, batch_sums=(compared,), activation_bytes_per_op=task.batch * LOSS_WIDTH
        )
    attention, feed_forward = 4 * part.width**2, 8 * part.width**2
    return MetaOpProfile(
        **common,
        parameters=part.component,
        component=part.component,
        param_bytes_per_op=WIDTH * (attention + feed_forward * max(1, part.experts)),
        whole_param_bytes_per_op=WIDTH * attention if part.experts else 0,
        num_experts=part.experts,
        extra_param_bytes={0: WIDTH * part.words * part.width} if part.words else {},
        activation_bytes_per_op=int(KEPT * task.batch * part.output_bytes),
        output_bytes=task.batch * part.output_bytes,
        matrices=_embedding(task, part),
    )


def _embedding(task: TaskWork, part: Part) -> tuple[Matrix, ...]:
    """What plans may sum by rows."""
    if not part.words:
        return ()
    table = Matrix(
        op=0,
        parameter=f"{part.component}.embedding",
        way="rows",
        outputs=part.words,
        inputs=part.width,
        num_bytes=WIDTH * part.words * part.width,
        factor_width=WIDTH,
        tokens=task.batch * part.tokens,
    )
    return (table,)


def _curve(batch: int, part: Part, device: str, label: str | None, most_devices: int) -> Iterator[CurvePoint]:
    """The best allocation of each number of devices that is faster than all smaller ones."""
    degrees = (1,) if part.is_loss else (1, *DEGREES)
    best: dict[int, tuple[float, int, int]] = {}
    for dp in (n for n in range(1, batch + 1) if batch % n == 0):
        for tp in degrees:
            if dp * tp <= most_devices:
                found = (layer_s(part, batch // dp, tp, device, batch), dp, tp)
                best[dp * tp] = min(best.get(dp * tp, found), found)
    fastest_s = float("inf")
    for count, (forward_s, dp, tp) in sorted(best.items()):
        if forward_s < fastest_s:
            fastest_s = forward_s
            yield CurvePoint(
                num_devices=count,
                dp=dp,
                tp=tp,
                forward_s=_rounded(forward_s),
                backward_s=_rounded(2 * forward_s),
                source="estimated",
                device=label,
            )


def _shares(batch: int, part: Part, device: str, label: str | None) -> Iterator[ShareTime]:
    """Every small share, and those that so many equal ones, rounded down, make up a batch of."""
    sizes = {*range(1, SMALL_SHARES + 1), *(batch // n for n in range(1, batch + 1))}
    for samples in sorted(n for n in sizes if 1 <= n <= batch):
        for tp in (1,) if part.is_loss else (1, *DEGREES):
            forward_s = layer_s(part, samples, tp, device, batch)
            yield ShareTime(
                samples=samples,
                tp=tp,
                forward_s=_rounded(forward_s),
                backward_s=_rounded(2 * forward_s),
                source="estimated",
                device=label,
            )


def layer_s(part: Part, samples: int, tp: int, device: str, batch: int) -> float:
    """The forward pass of a layer on so many samples, by so many devices of a tensor-parallel group."""
    flops = samples * (4 * batch * LOSS_WIDTH if part.is_loss else part.flops) / tp
    taken_s = START_S + flops / (BUSY_SHARE * device_peak(device).flops_per_s[ARITHMETIC])
    if tp > 1:
        taken_s += SPLIT_START_S + samples * part.output_bytes * (tp - 1) / tp / SPLIT_BYTES_PER_S
    return taken_s


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")
