"""What ops of a MetaOp take of time and memory, and the ranges of what files say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Annotated, Literal, Protocol, TypeVar

from pydantic import Field, model_validator

from spindle_cli.files.artifact import Model
from spindle_cli.files.cluster import MAX_DEVICES

DeviceType = Annotated[str, Field(min_length=1)]
Source = Literal["measured", "composed", "fitted", "estimated"]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
OpSeconds = Annotated[float, Field(ge=0, le=1e9)]  # more is no measurement; sums of them stay finite
Bytes = Annotated[int, Field(ge=0, le=2**63 - 1)]
Devices = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
Samples = Annotated[int, Field(ge=1, le=2**40)]  # of a batch
Ratio = Annotated[float, Field(ge=0, le=1e6)]  # of bytes, or seconds of bytes, to others
# Of a workload: every schedule that is looked at counts them one by one. Large models have some hundreds.
MAX_OPS = 20_000
NumOps = Annotated[int, Field(ge=1, le=MAX_OPS)]  # of one MetaOp
OpNumber = Annotated[int, Field(ge=0, lt=MAX_OPS)]


class CurvePoint(Model):
    """One valid allocation of a MetaOp, and one op's seconds over the whole batch, without the gradient sum.

    Attributes:
        num_devices: dp x tp.
        dp: Shares of the batch.
        tp: Devices that hold one share together.
        forward_s: Seconds of one op forward.
        backward_s: Seconds of one op backward.
        source: `measured`; `composed` (one device's share, plus collectives from the link model); `fitted`;
            or `estimated` (from published peaks). In a calibrated profile, points that a run has measured are
            `measured`, and those that were scaled are `fitted`.
        spread: Interquartile range of the repeats over their median.
        repeats: How often it was measured; in a calibrated profile, the run's steps.
        communication_s: What the op's own collectives take, of both passes.
        device: The type of the devices; absent: the profile's `device`.
    """

    num_devices: Devices
    dp: Devices
    tp: Devices = 1
    forward_s: OpSeconds
    backward_s: OpSeconds
    source: Source
    spread: Annotated[float, Field(ge=0)] | None = None
    repeats: Annotated[int, Field(ge=1)] | None = None
    communication_s: Seconds = 0.0
    device: DeviceType | None = None

    @model_validator(mode="after")
    def _degrees_multiply(self) -> CurvePoint:
        if self.dp * self.tp != self.num_devices:
            raise ValueError(f"dp {self.dp} x tp {self.tp} is not num_devices {self.num_devices}")
        return self

    @property
    def op_s(self) -> float:
        """Seconds of one op, forward and backward."""
        return self.forward_s + self.backward_s


class ShareTime(Model):
    """Seconds of one op on a share of so many samples, by the `tp` devices that hold it together.

    Attributes:
        samples: Samples of the share.
        tp: Devices that hold it together.
        forward_s: Seconds of one op forward.
        backward_s: Seconds of one op backward.
        source: How it was obtained, as for points of a curve.
        communication_s: What the op's own collectives take, of both passes.
        device: The type of the devices; absent: the profile's `device`.
    """

    samples: Samples
    tp: Devices = 1
    forward_s: OpSeconds
    backward_s: OpSeconds
    source: Source
    communication_s: Seconds = 0.0
    device: DeviceType | None = None


def points_of_shares(shares: Sequence[ShareTime], batch_size: int) -> tuple[CurvePoint, ...]:
    """Return the allocations of whole batches that shares of these sizes say the times of, ascending by
    device.
    """
    points = [
        CurvePoint(
            num_devices=batch_size // share.samples * share.tp,
            dp=batch_size // share.samples,
            tp=share.tp,
            forward_s=share.forward_s,
            backward_s=share.backward_s,
            source=share.source,
            communication_s=share.communication_s,
            device=share.device,
        )
        for share in shares
        if batch_size % share.samples == 0
    ]
    points.sort(key=lambda point: (point.num_devices, point.tp))
    return tuple(point for of_device in by_device(points).values() for point in of_device)


OfDevice = TypeVar("OfDevice", CurvePoint, ShareTime)


def by_device(entries: Sequence[OfDevice]) -> dict[str | None, list[OfDevice]]:
    """Points or shares by the type of device that they name, in the order in which they come."""
    by_type: dict[str | None, list[OfDevice]] = {}
    for entry in entries:
        by_type.setdefault(entry.device, []).append(entry)
    return by_type


class OpMemory(Model):
    """What ops of a MetaOp take of a device's memory at one degree of tensor parallelism, beside parameters,
    inputs and the batch's fields. Each is a pair: bytes whatever the share of the batch, and bytes for the
    whole batch, of which a device has 1 / dp.

    Attributes:
        tp: Degree of tensor parallelism.
        first_op: The entry holds from this op on, up to the next entry's.
        kept_bytes: Kept from forward to backward.
        forward_bytes: The most while an op runs forward, with what it keeps.
        backward_bytes: The most while it runs backward, beyond `kept_bytes`.
        first_backward_bytes: The same where it makes the gradients of its parameters, instead of adding to
            those that are there.
        joined_bytes: For the whole batch, what an op hands on of which devices have a part of the sequence
            each; a slice that ends with it keeps all of it, too.
        selective_bytes: Kept from forward to backward where the op is recomputed except for what takes
            longest; absent: not known.
    """

    tp: Devices = 1
    first_op: OpNumber = 0
    kept_bytes: tuple[Bytes, Bytes]
    forward_bytes: tuple[Bytes, Bytes]
    backward_bytes: tuple[Bytes, Bytes]
    first_backward_bytes: tuple[Bytes, Bytes]
    joined_bytes: Bytes = 0
    selective_bytes: tuple[Bytes, Bytes] | None = None

    def rebatched(self, ratio: float) -> OpMemory:
        """Return this op's memory for a batch of `ratio` times as many samples."""
        scaled = self.with_pairs(lambda fixed, whole: (fixed, round(whole * ratio)))
        return scaled.model_copy(update={"joined_bytes": round(self.joined_bytes * ratio)})

    def with_pairs(self, change: Callable[[int, int], tuple[int, int]]) -> OpMemory:
        """Changes each pair of bytes: those whatever the share, and those for the whole batch."""
        keys = ("kept_bytes", "forward_bytes", "backward_bytes", "first_backward_bytes", "selective_bytes")
        pairs = {key: getattr(self, key) for key in keys}
        return self.model_copy(update={key: change(*pair) for key, pair in pairs.items() if pair is not None})


class FitSegment(Model):
    """One segment of the piecewise alpha-beta fit: T(n) = alpha_s + beta_s + gamma_s / n for from_n <= n <=
    to_n.

    Attributes:
        from_n: The least number of devices.
        to_n: The largest number of devices.
        alpha_s: What more devices do not shrink, in seconds.
        beta_s: Communication that more devices do not shrink, in seconds.
        gamma_s: What devices divide, in seconds.
    """

    from_n: int
    to_n: int
    alpha_s: float
    beta_s: float
    gamma_s: float


class Fit(Model):
    """The fitted curve and how far it is off: leave a measured point out, predict it, relative error.

    Attributes:
        segments: By ascending number of devices.
        leave_one_out_error: Median over the points; absent: too few to leave one out.
        worst_error: The largest error.
    """

    segments: tuple[FitSegment, ...]
    leave_one_out_error: float | None = None
    worst_error: float | None = None


class PhaseTimes(Model):
    """Median seconds of one op on one share.

    Attributes:
        forward_s: Of the forward pass.
        backward_s: Of the backward pass.
        spread: Interquartile range of the repeats over their median.
        repeats: How often it was measured.
        communication_s: What the op's own collectives take, of both together.
    """

    forward_s: Seconds
    backward_s: Seconds
    spread: Annotated[float, Field(ge=0)] | None = None
    repeats: Annotated[int, Field(ge=1)] | None = None
    communication_s: Seconds = 0.0


def require_known(types: Set[DeviceType | None], profiled: Sequence[DeviceType], where: str) -> None:
    """Entries are of types that a profile has, and name its first one all or not at all.

    Raises:
        ValueError: they do not; `where` in the profile.
    """
    strange = sorted(types - {None, *profiled}, key=str)
    if strange:
        raise ValueError(
            f"{where}: an entry for {strange[0]!r}; expected one of the types that `devices` has: "
            f"{', '.join(profiled)}"
        )
    if {None, profiled[0]} <= types:
        raise ValueError(
            f"{where}: entries without a device, which are of {profiled[0]!r}, and entries that name it; "
            "expected one way for all of them"
        )


def require_own_ops(numbers: Mapping[str, Iterable[int]], num_ops: int, name: str) -> None:
    """Refuse what is said of an op that a MetaOp does not have.

    Args:
        numbers: of ops, by the key that says something of them.
        name: of the MetaOp.

    Raises:
        ValueError: with the key and the number.
    """
    for key, said in numbers.items():
        beyond = next((op for op in said if not 0 <= op < num_ops), None)
        if beyond is not None:
            raise ValueError(f"{key}: op {beyond} of {name!r}; expected one of its {num_ops}, from 0")


class _Timed(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def curve(self) -> Sequence[CurvePoint]: ...
    @property
    def shares(self) -> Sequence[ShareTime]: ...
    @property
    def batch_sums(self) -> Sequence[object]: ...


def require_whole(metaop: _Timed) -> None:
    """Refuse what only a MetaOp has whose batch is split.

    Raises:
        ValueError: a point, a share, or sums over several devices' shares.
    """
    dp = max(point.dp for point in metaop.curve)
    fault = (
        f"a point of the curve has dp {dp}"
        if dp > 1
        else "there are shares"
        if metaop.shares
        else "there are batch_sums"
        if metaop.batch_sums
        else None
    )
    if fault is not None:
        raise ValueError(
            f"coupled: true of {metaop.name!r}, whose batch is then never split, and {fault}; expected "
            "neither: leave out `coupled`, or list its class under the workload's `coupled` and profile again"
        )
