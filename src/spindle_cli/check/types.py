"""What a check finds and reports."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.plan.types import Plan, Slice, format_devices
from spindle_cli.units import counted, format_seconds

# Times in files are decimal roundings: what is later by less than this share of what a slice takes counts as
# equal.
RELATIVE_SLACK = 1e-6
# Characters of each part of a message; names in a file may have any number.
_MOST_SHOWN = 400
# What floats near a time can be off by.
_ROUNDING = 4 * sys.float_info.epsilon

# Each rule, by the name that a `Violation` has: what it asks of a plan.
RULES = {
    "unknown-metaop": "every MetaOp that slices name exists",
    "unknown-device": "every device that slices name exists",
    "ops-range": "the ops of a slice are some of its MetaOp's",
    "wave-index": "the `index` of a wave is its position",
    "parameter-blocks": "`parameter_blocks` has an entry for each op of its MetaOp",
    "rows": "dp + 1 offsets that ascend from 0 to the size of the batch, or micro-batch",
    "task-sets": "sets of tasks are of tasks that there are, with shares that add up to 1",
    "buffers": "what changes buffers runs on the same devices in all sets of tasks",
    "islands": (
        "`islands.cluster` is as many equal runs of nodes as `local_sgd` says, of which `cluster` is "
        "one; `outer_step_bytes` and `outer_step_s` are what the account says"
    ),
    "coverage": "every op of every MetaOp in exactly one slice, of each micro-batch",
    "experts": "no more `tp` than `num_experts`, where there are any",
    "allocation": (
        "dp x tp devices; without `rows` dp divides the batch, or micro-batch; the curve has the point, "
        "or the shares reach to it, or to the largest of its `rows`"
    ),
    "device-twice": "the devices of a slice are different ones",
    "types": (
        "on a cluster of several types, each entry of `curve` and `shares` names one of them; on one of "
        "a single type, none is of another; they ascend, of each type"
    ),
    "tensor-parallel": "the `tp` devices that hold one share of a slice are of one node",
    "duration": (
        "a slice lasts at least ops x (forward_s + backward_s), in version 2 each pass its part (one "
        "violation for both, which says the type of device that the slice was timed by, where that can "
        "be told); what is recomputed, forward twice; with `selective`, its `selective_share` again"
    ),
    "selective": "a slice with `selective` has `tp` 1, and its MetaOp a `selective_share`",
    "offload": (
        "ranges of the slice's own ops that ascend, none twice; on GPUs a cluster with `links.host` for "
        "the nodes of all of its devices"
    ),
    "host-memory": "activations of a node's devices fit its `host_memory_gib`",
    "gathered": (
        "MetaOps agree on a matrix; its slices have `tp` 1, and on GPUs its devices are of one type; with "
        "`--profile`: it is one of the profile's `matrices`"
    ),
    "copies": (
        "on GPUs of several types: devices that each update their own copy of parameters "
        "(`optimizer_state_sharded: false`, or `none` under `sharding`) are of one type, as types round "
        "differently"
    ),
    "tied": (
        "MetaOps agree on parameters that ops of several keys use: bytes, keys, their own among these, "
        "whether trained, and whether any op splits them"
    ),
    "sharding": (
        "all slices of parameters that are shared out beyond optimizer state run on the same devices; of "
        "parameters that are themselves shared out, on those of one of several replica groups"
    ),
    "micro-batches": (
        "MetaOps that take from each other have as many; one where an op sums something over its batch "
        "(`batch_sums`) or changes buffers with it"
    ),
    "order": "a MetaOp's slices follow each other",
    "producer": "a MetaOp starts when its inputs have ended",
    "backward": (
        "in version 2: a backward pass starts when its forward pass and the backward passes of all that "
        "take its output have ended"
    ),
    "device-busy": "a device runs one slice, or pass, at a time",
    "wave-devices": "slices of a wave are on disjoint devices",
    "wave-times": "slices of a wave are inside its times",
    "wave-order": "waves are ordered by start",
    "compute": "`compute_s` is the end of the schedule",
    "lower-bound": (
        "`lower_bound_s` (of version 1), `lower_bound_any_s` and `lower_bound_with_memory_s` are not above "
        "`compute_s`, `lower_bound_with_links_s` not above `iteration_s`; with `--profile`, `lower_bound_s` "
        "is not below the work and the longest chain"
    ),
    "iteration": "`iteration_s` is not below `compute_s`",
    "memory": "every device holds what it needs",
    "peak-memory": (
        "`peak_memory_bytes` says how much devices need; said by an earlier formula, it is not compared"
    ),
    "profile": "with `--profile`: the hash is the profile's",
    "metaops": "with `--profile`: the MetaOps are the profile's",
    "curve": "with `--profile`: the curve points and the shares are the profile's",
}


class Violation(Model):
    """One rule that a plan breaks, and where.

    Attributes:
        rule: Name of the rule, for scripts: one of `RULES`.
        where: 'wave 3, image_text/vision[0:6]', or the key of the plan file that is wrong.
        devices: Devices concerned; empty where the rule is not about devices.
        value: What the plan says.
        expected: What the rule asks for.
    """

    rule: str
    where: str
    devices: tuple[int, ...] = ()
    value: str
    expected: str

    def __str__(self) -> str:
        place = self.where
        if self.devices:
            shown = [str(item) for item in format_devices(self.devices)]
            listed = ", ".join(shown[:6]) + (", ..." if len(shown) > 6 else "")
            place += f", device{'s' if len(self.devices) > 1 else ''} {listed}"
        return f"{_short(place)}: {_short(self.value)}; expected {_short(self.expected)} [{self.rule}]"


def _short(text: str) -> str:
    """The beginning and the end of what is long."""
    if len(text) <= _MOST_SHOWN:
        return text
    half = _MOST_SHOWN // 2
    return f"{text[:half]} ... {text[-half:]}"


def slack_s(*slices: Slice) -> float:
    """Seconds by which times of these slices may differ and still count as equal: by the shortest of them, as
    one that is stretched says nothing of the others.
    """
    times = [interval for slice_ in slices for interval in slice_.times_s]
    shortest = min((end_s - start_s for start_s, end_s in times), default=0.0)
    return RELATIVE_SLACK * max(shortest, 0.0) + _ROUNDING * max((end_s for _, end_s in times), default=0.0)


def place_of(wave: int, slice_: Slice) -> str:
    """A slice by its wave and its ops, for messages."""
    return f"wave {wave}, {slice_.label}"


def located(plan: Plan) -> Iterable[tuple[int, Slice]]:
    """Every slice with its wave's index, in file order."""
    return ((wave.index, slice_) for wave in plan.waves for slice_ in wave.slices)


def exact_s(seconds: float) -> str:
    """A time that can be compared with the file's digits, and read: '0.012345678 s (12.3 ms)'."""
    return f"{seconds:.9g} s ({format_seconds(seconds)})"


class CheckReport(Artifact):
    """The document of `spindle check --json`.

    Attributes:
        plan: The plan.
        valid: Whether it breaks no rule.
        num_slices: Slices of the plan.
        num_waves: Waves of the plan.
        num_devices: Devices of its cluster.
        violations: Rules that it breaks.
    """

    KIND: ClassVar[str] = "check"

    schema_: Annotated[Literal["spindle.check/1"], Field(alias="schema")] = "spindle.check/1"
    plan: str
    valid: bool
    num_slices: int
    num_waves: int
    num_devices: int
    violations: tuple[Violation, ...]

    @classmethod
    def of(cls, path: str, plan: Plan, violations: tuple[Violation, ...]) -> CheckReport:
        """The report on a plan read from `path`."""
        return cls(
            plan=path,
            valid=not violations,
            num_slices=len(plan.slices),
            num_waves=len(plan.waves),
            num_devices=plan.cluster.num_devices,
            violations=violations,
        )

    def __str__(self) -> str:
        size = (
            f"{counted(self.num_slices, 'slice')} in {counted(self.num_waves, 'wave')} "
            f"on {counted(self.num_devices, 'device')}"
        )
        if self.valid:
            return f"{self.plan}: valid ({size})"
        count = len(self.violations)
        head = f"{self.plan}: {count} violation{'s' if count > 1 else ''} ({size})"
        return "\n".join([head, *(f"  {violation}" for violation in self.violations)])
