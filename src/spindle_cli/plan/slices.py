"""Slices of a plan, and the waves that they make up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_serializer, field_validator, model_validator

from spindle_cli.files.artifact import Model, shown
from spindle_cli.files.cluster import MAX_DEVICES
from spindle_cli.profile.types import Devices, MetaOp, NumOps, OpNumber, Seconds

# What `parse_devices` takes.
DEVICES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+-[0-9]+$"}]},
}


def parse_devices(value: Any) -> tuple[int, ...]:
    """Device numbers from numbers and inclusive ranges: [0, '2-4'] -> (0, 2, 3, 4). Order is kept.

    Raises:
        ValueError: not a list, or an item that is neither a number nor an ascending 'first-last'.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("expected a list of device numbers and 'first-last' ranges")
    devices: list[int] = []
    for item in value:
        if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            devices.append(item)
            continue
        first, dash, last = item.partition("-") if isinstance(item, str) else ("", "", "")
        if not (first.isdigit() and dash and last.isdigit() and int(first) <= int(last) < MAX_DEVICES):
            raise ValueError(f"expected a device number or a 'first-last' range, found {shown(item)}")
        devices.extend(range(int(first), int(last) + 1))
        if len(devices) > MAX_DEVICES:
            raise ValueError(f"more than {MAX_DEVICES} devices")
    return tuple(devices)


def format_devices(devices: tuple[int, ...]) -> list[int | str]:
    """The inverse of `parse_devices`: runs of three or more consecutive numbers become 'first-last'."""
    items: list[int | str] = []
    start = 0
    while start < len(devices):
        end = start
        while end + 1 < len(devices) and devices[end + 1] == devices[end] + 1:
            end += 1
        if end - start >= 2:
            items.append(f"{devices[start]}-{devices[end]}")
        else:
            items.extend(devices[start : end + 1])
        start = end + 1
    return items


RowOffset = Annotated[int, Field(ge=0, le=2**40)]  # samples


class Slice(Model):
    """Consecutive ops [first, last) of one MetaOp on a list of devices.

    For every micro-batch the slices of a MetaOp cover every op once, in order. A pass lasts at least the
    number of its ops times what the profile says of one op on these devices.

    Attributes:
        metaop: Name of the MetaOp.
        ops: The first op, and the one behind the last.
        devices: Numbers, and inclusive ranges 'first-last'. Each consecutive `tp` of them hold one batch
            share; the shares go in the order of the list.
        dp: How many shares of the batch, or micro-batch, there are.
        tp: How many devices hold each share, and split the op between them (tensor parallelism).
        rows: Shares of unequal size, as offsets that ascend from 0 to the size of the batch, or micro-batch:
            share i has the samples from `rows[i]` to `rows[i + 1]`, at least one. Losses and gradients are
            those of the whole batch, however it is cut. Absent: equal shares. In version 2 alone.
        start_s: When it starts to run: forward and backward together, in version 2 forward alone.
        end_s: When it ends.
        backward_start_s: When its backward pass starts, which includes what is recomputed; not before its
            forward pass and the backward passes of all that takes its output have ended. In version 2 alone.
        backward_end_s: When its backward pass ends.
        recompute: Whether its activations are recomputed in the backward pass instead of kept.
        selective: With `recompute`, whether what matrix products, convolutions and attention give is kept
            nevertheless, so that only `selective_share` of the forward pass runs again.
        offload: Ranges of its ops, [first, last) as in `ops`, whose activations are in host memory from
            forward to backward. These are not recomputed, whatever `recompute` says.
        micro_batch: Which of its task's micro-batches it runs, counted from 0: the k-th of K has the samples
            [k B / K, (k + 1) B / K) of a batch of B. It takes only from slices of the same one.
        micro_batches: How many of them there are, as the plan says for its task; not in files.
    """

    metaop: str
    ops: tuple[OpNumber, NumOps]
    devices: Annotated[tuple[int, ...], WithJsonSchema(DEVICES_SCHEMA)]
    dp: Devices
    tp: Devices = 1
    rows: Annotated[tuple[RowOffset, ...], Field(min_length=2)] | None = None
    start_s: Seconds
    end_s: Seconds
    backward_start_s: Seconds | None = None
    backward_end_s: Seconds | None = None
    recompute: bool = False
    selective: bool = False
    offload: tuple[tuple[OpNumber, NumOps], ...] = ()
    micro_batch: Annotated[int, Field(ge=0, le=2**31)] = 0
    micro_batches: Annotated[int, Field(ge=1, exclude=True)] = 1

    @field_validator("devices", mode="before")
    @classmethod
    def _parse_devices(cls, value: Any) -> tuple[int, ...]:
        return parse_devices(value)

    @field_serializer("devices")
    def _format_devices(self, devices: tuple[int, ...]) -> list[int | str]:
        return format_devices(devices)

    @model_validator(mode="after")
    def _backward_whole_or_not(self) -> Slice:
        if (self.backward_start_s is None) != (self.backward_end_s is None):
            raise ValueError(f"{self.label}: backward_start_s and backward_end_s: expected both or neither")
        return self

    @model_validator(mode="after")
    def _selective_recomputes(self) -> Slice:
        if self.selective and not self.recompute:
            raise ValueError(f"{self.label}: selective: expected only with `recompute: true`")
        return self

    @property
    def backward_s(self) -> tuple[float, float] | None:
        """Start and end of the backward pass; None where forward and backward are planned together."""
        if self.backward_start_s is None or self.backward_end_s is None:
            return None
        return self.backward_start_s, self.backward_end_s

    @property
    def times_s(self) -> tuple[tuple[float, float], ...]:
        """Start and end of each stretch in which its devices run it: one, or that of each pass."""
        backward = self.backward_s
        return ((self.start_s, self.end_s),) if backward is None else ((self.start_s, self.end_s), backward)

    @property
    def busy_s(self) -> float:
        """Seconds that it occupies each of its devices, both passes."""
        return sum(end_s - start_s for start_s, end_s in self.times_s)

    @property
    def last_s(self) -> float:
        """When its devices are through with it."""
        return max(end_s for _, end_s in self.times_s)

    @property
    def shares_of_batch(self) -> int:
        """Into how many shares of this size its task's batch is cut."""
        return self.dp * self.micro_batches

    @property
    def num_ops(self) -> int:
        """Number of ops in the slice."""
        return self.ops[1] - self.ops[0]

    @property
    def num_offloaded(self) -> int:
        """How many of its ops have their activations in host memory."""
        return sum(last - first for first, last in self.offload)

    @property
    def num_recomputed(self) -> int:
        """How many of its ops run forward once more in the backward pass."""
        return self.num_ops - self.num_offloaded if self.recompute else 0

    @property
    def label(self) -> str:
        """For people and programs: 'image_text/vision[0:6]', or 'image_text/vision[0:6] 2/4', the second of
        four micro-batches.
        """
        return f"{self.metaop}[{self.ops[0]}:{self.ops[1]}]{self.part}"

    @property
    def part(self) -> str:
        """Which of how many micro-batches it is of, as part of a label; empty where there is one."""
        return f" {self.micro_batch + 1}/{self.micro_batches}" if self.micro_batches > 1 else ""


class Wave(Model):
    """Slices that run side by side on disjoint devices.

    Attributes:
        index: Its number, counted from 0.
        start_s: When the first of its slices starts.
        end_s: When the last of them has ended.
        slices: What runs in it.
    """

    index: Annotated[int, Field(ge=0, le=2**31)]
    start_s: Seconds
    end_s: Seconds
    slices: Annotated[tuple[Slice, ...], Field(min_length=1)]


def fitted_to(wave: Wave, metaops: Mapping[str, MetaOp], micro_batches: Mapping[str, int]) -> Wave:
    """A wave whose slices know how many micro-batches there are, and say no `rows` where these are equal
    shares.

    Args:
        metaops: by name.
        micro_batches: by task; one where it says nothing.

    Raises:
        ValueError: a slice is of a micro-batch that there is not.
    """
    slices = tuple(_fitted(slice_, metaops, micro_batches) for slice_ in wave.slices)
    if all(new is old for new, old in zip(slices, wave.slices, strict=True)):
        return wave
    return wave.model_copy(update={"slices": slices})


def _fitted(slice_: Slice, metaops: Mapping[str, MetaOp], micro_batches: Mapping[str, int]) -> Slice:
    metaop = metaops.get(slice_.metaop)
    count = 1 if metaop is None else micro_batches.get(metaop.task, 1)
    if slice_.micro_batch >= count:
        raise ValueError(
            f"slice {slice_.label}: micro_batch: expected less than {count}, its task's micro_batches "
            f"(found {slice_.micro_batch})"
        )
    changes: dict[str, Any] = {} if slice_.micro_batches == count else {"micro_batches": count}
    if metaop is not None and slice_.rows is not None:
        changes |= {"rows": None} if slice_.rows == equal_rows(metaop.batch_size // count, slice_.dp) else {}
    return slice_.model_copy(update=changes) if changes else slice_


def rows_of(samples: int, dp: int) -> tuple[int, ...] | None:
    """Offsets of `dp` shares as equal as can be; None where these are equal."""
    return None if samples % dp == 0 else tuple(share * samples // dp for share in range(dp + 1))


def equal_rows(samples: int, dp: int) -> tuple[int, ...]:
    """Offsets of `dp` equal shares of so many samples; () where there are none."""
    return () if samples % dp else tuple(range(0, samples + 1, samples // dp))
