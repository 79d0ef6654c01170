"""One profile from several of one workload, each made on, or for, another type of device."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from spindle_cli.errors import InputError
from spindle_cli.profile.machine.devices import cluster_device_name
from spindle_cli.profile.mixed.seen import devices_of
from spindle_cli.profile.moving import ProcessorCosts
from spindle_cli.profile.points import OfDevice, OpMemory
from spindle_cli.profile.types import Device, MetaOpProfile, Profile

# What may differ from device to device: times, and what was counted or looked at on each.
_OF_DEVICES = frozenset(
    {
        "curve",
        "shares",
        "fit",
        "memory",
        "selective_share",
        "activation_bytes_per_op",
        "flops_per_op",
        "batch_sums",
    }
)
# What is known only where splits of layers were looked at: on nodes of several devices.
_OF_SPLITS = frozenset({"whole_param_bytes_per_op", "split_extra_param_bytes", "num_experts"})
# What training the profiles' times are of.
_OF_TRAINING = frozenset(
    {
        "optimizer_state_per_param",
        "optimizer_state_sharded",
        "update_bytes_per_param",
        "gradient_bytes_per_param",
        "clips_gradients",
        "scales_losses",
        "accumulate",
        "loss_chunks",
        "local_sgd",
        "task_sets",
    }
)
_OF_ENVIRONMENT = ("precision", "compile", "float32_matmul")


def merge(named: Sequence[tuple[Path, Profile]]) -> Profile:
    """Return a profile with the curves of all, the first one's `device` first.

    What ops hold is the most that any of them says, what the update and a processor's other work take the
    longest; measurements to be reused, and runs that times were corrected by, are left out. What tensor
    parallelism splits is known from those that have looked at it.

    Args:
        named: each with its file, for messages.

    Raises:
        InputError: they are of different workloads or trainings, or two are of one type of device.
    """
    first = named[0][1]
    # All are held to one that knows all there is to know.
    fullest_path, fullest = next((entry for entry in named if _knows_splits(entry[1])), named[0])
    for path, profile in named:
        if profile is not fullest:
            _require_same(fullest_path, fullest, path, profile)
    parts = list(_by_device(named))
    devices = tuple(device.model_copy(update={"type": name}) for _, device, name in parts)
    update: dict[str, Any] = {
        "device": devices[0],
        "devices": devices,
        "noise": None,
        "measurements": None,
        "calibration": None,
        "metaops": tuple(_merged(metaop, parts) for metaop in fullest.metaops),
        "optimizer_s_per_byte": max(profile.optimizer_s_per_byte for _, profile in named),
        "processor": _slowest([profile.processor for _, profile in named]),
        # Older profiles do not say it.
        "updates_by_parts": all(profile.updates_by_parts for _, profile in named),
        "numeric_check": next((p.numeric_check for _, p in named if p.numeric_check is not None), None),
    }
    return Profile.model_validate(first.model_copy(update=update).model_dump(mode="json", by_alias=True))


def _by_device(named: Sequence[tuple[Path, Profile]]) -> Iterator[tuple[Profile, Device, str]]:
    """Yield every device of some profiles, with its profile and the name of its type in cluster files.

    Raises:
        InputError: two are of one type.
    """
    types: dict[str, Path] = {}
    for path, profile in named:
        for device in devices_of(profile):
            name = cluster_device_name(device)
            if name in types:
                raise InputError(
                    f"{path}: it has curves of {name!r}, which {types[name]} has too",
                    hint="Merge profiles of different types of device; of one type, give one.",
                )
            types[name] = path
            yield profile, device, name


def _require_same(first_path: Path, first: Profile, path: Path, second: Profile) -> None:
    if second.workload.fingerprint != first.workload.fingerprint:
        raise InputError(
            f"{path}: a profile of the workload {second.workload.name!r} "
            f"({second.workload.fingerprint[:19]}...); {first_path} is of "
            f"{first.workload.name!r} ({first.workload.fingerprint[:19]}...)",
            hint="Profile the same workload, with the same arguments"
            + (
                ", the same --batches and the same --length-percentile, on each type of device: they are of "
                "other lengths of the batches."
                if second.workload.lengths != first.workload.lengths
                else ", on each type of device."
            ),
        )
    for key in sorted(_OF_TRAINING):
        _require_equal(first_path, getattr(first, key), path, getattr(second, key), key)
    for key in _OF_ENVIRONMENT:
        ours, theirs = first.environment.get(key), second.environment.get(key)
        _require_equal(first_path, ours, path, theirs, f"environment.{key}")
    if list(first.by_name) != list(second.by_name):
        differs = sorted(set(first.by_name) ^ set(second.by_name)) or list(second.by_name)
        raise InputError(
            f"{path}: metaops: {', '.join(differs[:3])}: not the MetaOps of {first_path}, in its order",
            hint="Profile both with the same version of spindle.",
        )
    both_know = _knows_splits(first) == _knows_splits(second)
    keys = set(MetaOpProfile.model_fields) - _OF_DEVICES - (frozenset() if both_know else _OF_SPLITS)
    for metaop in second.metaops:
        same = first.by_name[metaop.name]
        if not both_know:
            metaop, same = _without_splits(metaop), _without_splits(same)
        for key in sorted(keys):
            where = f"metaops: {metaop.name}.{key}"
            _require_equal(first_path, getattr(same, key), path, getattr(metaop, key), where)


def _knows_splits(profile: Profile) -> bool:
    """Whether layers that are split were looked at."""
    return any(
        degree > 1
        for metaop in profile.metaops
        for entries in (metaop.curve, metaop.shares, metaop.memory)
        for degree in (entry.tp for entry in entries)
    )


def _without_splits(metaop: MetaOpProfile) -> MetaOpProfile:
    """Return a MetaOp as a profile says it where no splits were looked at."""
    none = {"is_split": False}
    tied = tuple(
        parameters.model_copy(update={**none, "is_split_by_any": False}) for parameters in metaop.tied
    )
    matrices = tuple(matrix.model_copy(update=none) for matrix in metaop.matrices)
    return metaop.model_copy(update={"tied": tied, "matrices": matrices})


def _require_equal(first_path: Path, expected: object, path: Path, value: object, key: str) -> None:
    if expected != value:
        raise InputError(
            f"{path}: {key} is {_short(value)}; expected {_short(expected)}, as in {first_path}",
            hint="Make both profiles with the same workload file, options and version of spindle.",
        )


def _short(value: object) -> str:
    """Writes a value as a file has it, in 60 characters at most."""
    said = to_jsonable_python(value)
    text = "nothing" if said is None else repr(said) if isinstance(said, str) else json.dumps(said)
    return text if len(text) <= 60 else text[:57] + "..."


def _merged(metaop: MetaOpProfile, parts: Sequence[tuple[Profile, Device, str]]) -> MetaOpProfile:
    curve, shares = [], []
    by_part = [profile.by_name[metaop.name] for profile, *_ in parts]
    for (profile, device, name), of_part in zip(parts, by_part, strict=True):
        curve += _named(of_part.curve, profile, device, name)
        shares += _named(of_part.shares, profile, device, name)
    flops = [of_part.flops_per_op for of_part in by_part if of_part.flops_per_op is not None]
    again = [of_part.selective_share for of_part in by_part]
    return metaop.model_copy(
        update={
            "curve": tuple(curve),
            "shares": tuple(shares),
            "fit": None,
            "memory": _most([of_part.memory for of_part in by_part]),
            "selective_share": None
            if None in again
            else max(of_part for of_part in again if of_part is not None),
            "activation_bytes_per_op": max(of_part.activation_bytes_per_op for of_part in by_part),
            "flops_per_op": max(flops, default=None),
        }
    )


def _named(entries: Iterable[OfDevice], profile: Profile, device: Device, name: str) -> list[OfDevice]:
    """Return the entries of one device of a profile, which then name it."""
    of_device = [entry for entry in entries if (entry.device or profile.device.type) == device.type]
    return [entry.model_copy(update={"device": name}) for entry in of_device]


def _most(memories: Sequence[Sequence[OpMemory]]) -> tuple[OpMemory, ...]:
    """Return the most of each number, for each degree and stretch of ops."""
    largest: dict[tuple[int, int], OpMemory] = {}
    for entry in (entry for memory in memories for entry in memory):
        key = entry.tp, entry.first_op
        held = largest.get(key)
        largest[key] = entry if held is None else _larger(held, entry)
    return tuple(largest[key] for key in sorted(largest))


def _larger(first: OpMemory, second: OpMemory) -> OpMemory:
    pairs = ("kept_bytes", "forward_bytes", "backward_bytes", "first_backward_bytes")
    update: dict[str, Any] = {
        key: tuple(map(max, getattr(first, key), getattr(second, key))) for key in pairs
    }
    ours, theirs = first.selective_bytes, second.selective_bytes
    if ours is None or theirs is None:
        update["selective_bytes"] = None
    else:
        update["selective_bytes"] = tuple(map(max, ours, theirs))
    return first.model_copy(update=update | {"joined_bytes": max(first.joined_bytes, second.joined_bytes)})


def _slowest(costs: Sequence[ProcessorCosts]) -> ProcessorCosts:
    tasks = dict.fromkeys(task for cost in costs for task in cost.load_s)
    return costs[0].model_copy(
        update={
            "message_s": max(cost.message_s for cost in costs),
            "s_per_byte": max(cost.s_per_byte for cost in costs),
            "step_s": max(cost.step_s for cost in costs),
            "pass_s": max(cost.pass_s for cost in costs),
            "load_s": {task: max(cost.load_s.get(task, 0.0) for cost in costs) for task in tasks},
        }
    )
