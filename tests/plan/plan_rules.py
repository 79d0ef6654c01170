"""The contract's rules of a valid plan, on the plan file's plain data: shares nothing with planner or
checker.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any


def numbers(devices: list[Any]) -> list[int]:
    """[0, '2-4'] -> [0, 2, 3, 4]."""
    found: list[int] = []
    for item in devices:
        first, _, last = str(item).partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def broken_rules(plan: dict[str, Any], profile: dict[str, Any]) -> list[str]:
    """What is wrong with a plan; empty if it is valid. No tolerance in time but a float's."""
    node_of = nodes_of_devices(plan["cluster"])
    num_devices = len(node_of)
    slices = [piece | {"wave": wave["index"]} for wave in plan["waves"] for piece in wave["slices"]]
    return [
        *_allocations(slices, profile, num_devices),
        *_order(slices, profile),
        *(_backward(slices, profile) if plan["schema"] == "spindle.plan/2" else ()),
        *_devices(slices),
        *groups_across_nodes(slices, node_of),
        *_waves(plan["waves"]),
        *_predictions(plan, slices, num_devices),
    ]


def passes(piece: dict[str, Any]) -> list[tuple[float, float]]:
    """Start and end of both passes together, or of each."""
    found = [(piece["start_s"], piece["end_s"])]
    if "backward_start_s" in piece:
        found.append((piece["backward_start_s"], piece["backward_end_s"]))
    return found


def _backward(slices: list[dict[str, Any]], profile: dict[str, Any]) -> list[str]:
    """Of version 2: behind the own forward pass, and behind the backward passes of all that consume it."""
    wrong = []
    consumers = defaultdict(list)
    for metaop in profile["metaops"]:
        for name in metaop["inputs"]:
            consumers[name].append(metaop["name"])
    for piece in slices:
        if piece["backward_start_s"] < piece["end_s"]:
            wrong.append(f"backward before forward: {piece}")
        for other in slices:
            follows = other["metaop"] == piece["metaop"] and other["ops"][0] >= piece["ops"][1]
            takes = other["metaop"] in consumers[piece["metaop"]]
            if (follows or takes) and piece["backward_start_s"] < other["backward_end_s"]:
                wrong.append(f"backward of {piece} before that of {other}")
    return wrong


def _allocations(slices: list[dict[str, Any]], profile: dict[str, Any], num_devices: int) -> list[str]:
    wrong = []
    curves = {metaop["name"]: metaop["curve"] for metaop in profile["metaops"]}
    for piece in slices:
        devices = numbers(piece["devices"])
        if len(set(devices)) != len(devices) or not set(devices) <= set(range(num_devices)):
            wrong.append(f"devices of {piece}")
        if len(devices) != piece["dp"] * piece["tp"]:
            wrong.append(f"number of devices of {piece}")
        points = [p for p in curves[piece["metaop"]] if (p["dp"], p["tp"]) == (piece["dp"], piece["tp"])]
        if not points:
            wrong.append(f"allocation of {piece}")
            continue
        forward_s, backward_s = points[0]["forward_s"], points[0]["backward_s"]
        backward_s += forward_s if piece.get("recompute") else 0.0
        needed = [forward_s, backward_s] if "backward_start_s" in piece else [forward_s + backward_s]
        for (start_s, end_s), op_s in zip(passes(piece), needed, strict=True):
            if end_s - start_s < (piece["ops"][1] - piece["ops"][0]) * op_s:
                wrong.append(f"length of {piece}")
    return wrong


def _order(slices: list[dict[str, Any]], profile: dict[str, Any]) -> list[str]:
    wrong = []
    of = defaultdict(list)
    for piece in slices:
        of[piece["metaop"]].append(piece)
    for pieces in of.values():
        pieces.sort(key=lambda piece: piece["ops"])
    for metaop in profile["metaops"]:
        pieces = of[metaop["name"]]
        edges = [0, *(piece["ops"][1] for piece in pieces)]
        if [piece["ops"][0] for piece in pieces] != edges[:-1] or edges[-1] != metaop["num_ops"]:
            wrong.append(f"ops of {metaop['name']}")
        wrong += [f"order of {b}" for a, b in pairwise(pieces) if b["start_s"] < a["end_s"]]
        inputs_end = max((of[name][-1]["end_s"] for name in metaop["inputs"]), default=0.0)
        if pieces[0]["start_s"] < inputs_end:
            wrong.append(f"{metaop['name']} starts before its inputs have ended")
    return wrong


def _devices(slices: list[dict[str, Any]]) -> list[str]:
    busy = defaultdict(list)
    for piece in slices:
        for device in numbers(piece["devices"]):
            busy[device] += passes(piece)
    return [
        f"device {device} runs two slices at {later[0]}"
        for device, spans in busy.items()
        for earlier, later in pairwise(sorted(spans))
        if later[0] < earlier[1]
    ]


def nodes_of_devices(cluster: dict[str, Any]) -> list[int]:
    """The node of each device, numbered node by node."""
    sizes = [group["devices"] for group in cluster["nodes"] for _ in range(group.get("count", 1))]
    return [node for node, size in enumerate(sizes) for _ in range(size)]


def groups_across_nodes(slices: list[dict[str, Any]], node_of: list[int]) -> list[str]:
    """Tensor-parallel groups that are not of one node."""
    wrong = []
    for piece in slices:
        devices = numbers(piece["devices"])
        groups = [devices[first : first + piece["tp"]] for first in range(0, len(devices), piece["tp"])]
        wrong += [
            f"group {group} of {piece}" for group in groups if len({node_of[device] for device in group}) > 1
        ]
    return wrong


def _waves(waves: list[dict[str, Any]]) -> list[str]:
    wrong = []
    if [wave["index"] for wave in waves] != list(range(len(waves))):
        wrong.append("indices of waves")
    wrong += [f"wave {b['index']} is out of order" for a, b in pairwise(waves) if b["start_s"] < a["start_s"]]
    for wave in waves:
        devices = [device for piece in wave["slices"] for device in numbers(piece["devices"])]
        if len(set(devices)) != len(devices):
            wrong.append(f"devices of wave {wave['index']} overlap")
        metaops = [piece["metaop"] for piece in wave["slices"]]
        if len(set(metaops)) != len(metaops):
            wrong.append(f"wave {wave['index']} has two slices of one MetaOp")
    return wrong


def _predictions(plan: dict[str, Any], slices: list[dict[str, Any]], num_devices: int) -> list[str]:
    predicted = plan["predicted"]
    wrong = []
    if predicted["compute_s"] != max(passes(piece)[-1][1] for piece in slices):
        wrong.append("compute_s is not the end of the schedule")
    bound_s = predicted["lower_bound_s"] if plan["schema"] == "spindle.plan/1" else 0.0
    if not bound_s <= predicted["compute_s"] <= predicted["iteration_s"]:
        wrong.append(f"predictions out of order: {predicted}")
    parts = sum(
        predicted[key]
        for key in ("compute_s", "transfer_s", "processor_s", "gradient_sum_s", "optimizer_s", "held_up_s")
    )
    if abs(parts - predicted["iteration_s"]) > 1e-9 * predicted["iteration_s"]:
        wrong.append("the parts of the iteration do not add up")
    if len(predicted["peak_memory_bytes"]) != num_devices:
        wrong.append("peak_memory_bytes")
    return wrong
