"""Actions as text and back, and one rank's program for people.

    F 4                                             run slice 4 forward
    F 4 on 6                                        the same, with its sums over communicator 6
    F 4 on 6 by 7,8                                 and with its sharded parameters over 7 and 8
    F 4 behind 9,12                                 when what it has sent as transfers 9 and 12 has left
    SEND #12 2->5 slice 4>6 rows 0:8 4096 B on 1    post transfer 12, device 2 to 5, from slice 4 to slice 6
    SEND #12 2->5 slice 4>6 rows 0:8 part 1/4 ...   of its numbers only the second of four parts
    LOSSES on 0                                     sum the losses
    SUM 3 op 2 on 4                                 sum parameter group 3; complete with op 2's backward
    SUM 3 on 4                                      the same, behind the pass before it
    FLAGS on 4                                      which parameters any device has reached
    NORM on 0                                       sum the gradients' norm; has one overflowed?
    UPDATE                                          step what is summed with nobody
    UPDATE 3                                        and what is summed up to group 3
    STEP
    GATHER 3 on 4                                   hand on the new parameters of group 3

A gradient's transfer keeps the forward direction of its slices: `SEND_GRAD #40 5->2 slice 4>6` goes from
slice 6 back to 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from spindle_cli.plan.types import format_devices
from spindle_cli.program.transfers import communicator_memory
from spindle_cli.program.types import COMPUTES, TRANSFERS, Action, Kind, Program, Transfer
from spindle_cli.units import counted, format_bytes, format_seconds

_TRANSFER = re.compile(
    r"(?P<kind>SEND|RECV|SEND_GRAD|RECV_GRAD) #(?P<key>\d+) (?P<source>\d+)->(?P<destination>\d+)"
    r" slice (?P<producer>\d+)>(?P<consumer>\d+) rows (?P<first>\d+):(?P<last>\d+)"
    r"(?: part (?P<part>\d+)/(?P<parts>\d+))? (?P<num_bytes>\d+) B"
)
_COMPUTE = re.compile(r"(?P<kind>F|B) (?P<slice>\d+)")
_SUM = re.compile(r"SUM (?P<group>\d+)(?: op (?P<op>\d+))?")
_GATHER = re.compile(r"GATHER (?P<group>\d+)")
_UPDATE = re.compile(r"UPDATE (?P<group>\d+)")
_ALONE = re.compile(r"(?P<kind>LOSSES|FLAGS|NORM|UPDATE|STEP)")
_WITHOUT_POST = (Kind.UPDATE, Kind.STEP)
_ON = re.compile(
    r"(?P<what>.*?)(?: on (?P<communicator>\d+))?(?: by (?P<shards>\d+(?:,\d+)*))?"
    r"(?: behind (?P<left>\d+(?:,\d+)*))?"
)
_POSTED = (*TRANSFERS, Kind.LOSSES, Kind.SUM, Kind.FLAGS, Kind.NORM, Kind.GATHER)


def format_action(action: Action) -> str:
    """The text form; `parse_action` is its inverse."""
    text = _format_what(action)
    if action.communicator is not None:
        text += f" on {action.communicator}"
    if action.shards:
        text += f" by {_listed(action.shards)}"
    return f"{text} behind {_listed(action.left)}" if action.left else text


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _format_what(action: Action) -> str:
    if action.transfer is not None:
        transfer = action.transfer
        part = "" if transfer.part[1] == 1 else f" part {transfer.part[0]}/{transfer.part[1]}"
        return (
            f"{action.kind} #{transfer.key} {transfer.source}->{transfer.destination}"
            f" slice {transfer.producer}>{transfer.consumer} rows {transfer.first}:{transfer.last}"
            f"{part} {transfer.num_bytes} B"
        )
    if action.kind is Kind.SUM:
        return f"{action.kind} {action.group}" + ("" if action.op is None else f" op {action.op}")
    number = action.slice_index if action.group is None else action.group
    return str(action.kind) if number is None else f"{action.kind} {number}"


def parse_action(text: str) -> Action:
    """The action that a line of text says.

    Raises:
        ValueError: not the text form of an action.
    """
    on = _ON.fullmatch(text)
    action = _parse_what(on["what"]) if on else None
    number = on["communicator"] if on else None
    shards, left = (
        tuple(map(int, on[name].split(","))) if on and on[name] else () for name in ("shards", "left")
    )
    if (
        action is None
        or (action.kind in _POSTED and number is None)
        or (action.kind in _WITHOUT_POST and number)
        or ((shards or left) and action.kind not in COMPUTES)
    ):
        example = "'F 4' or 'SEND #12 2->5 slice 4>6 rows 0:8 4096 B on 1'"
        raise ValueError(f"expected an action such as {example}, found {text!r}")
    communicator = None if number is None else int(number)
    return replace(action, communicator=communicator, shards=shards, left=left)


def _parse_what(text: str) -> Action | None:
    if match := _ALONE.fullmatch(text):
        return Action(Kind(match["kind"]))
    if match := _COMPUTE.fullmatch(text):
        return Action(Kind(match["kind"]), slice_index=int(match["slice"]))
    if match := _SUM.fullmatch(text):
        return Action(
            Kind.SUM, group=int(match["group"]), op=None if match["op"] is None else int(match["op"])
        )
    if match := _UPDATE.fullmatch(text):
        return Action(Kind.UPDATE, group=int(match["group"]))
    if match := _GATHER.fullmatch(text):
        return Action(Kind.GATHER, group=int(match["group"]))
    if match := _TRANSFER.fullmatch(text):
        fields = match.groupdict()
        kind = Kind(fields.pop("kind"))
        number, count = fields.pop("part"), fields.pop("parts")
        part = (int(number or 0), int(count or 1))
        numbers = {name: int(value) for name, value in fields.items()}
        is_gradient = kind in (Kind.SEND_GRAD, Kind.RECV_GRAD)
        return Action(kind, transfer=Transfer(**numbers, is_gradient=is_gradient, part=part))
    return None


def format_rank(program: Program, rank: int) -> str:
    """One device's program, an action a line, with what each one means, and its communicators; ends with a
    newline.

    Raises:
        ValueError: the cluster has no such device.
    """
    if rank not in program.actions:
        raise ValueError(f"rank {rank}: expected one of the plan's devices, 0 to {len(program.actions) - 1}")
    actions = program.actions[rank]
    width = len(str(len(actions)))
    texts = [format_action(action) for action in actions]
    column = max(map(len, texts))
    lines = [
        f"{step:>{width}}  {text:<{column}}  {_explain(program, rank, action)}".rstrip()
        for step, (text, action) in enumerate(zip(texts, actions, strict=True))
    ]
    return "\n".join([*lines, "", *_communicator_lines(program, rank)]) + "\n"


def _communicator_lines(program: Program, rank: int) -> list[str]:
    joined = [communicator for communicator in program.communicators if rank in communicator.ranks]
    taken = communicator_memory(program, rank)
    total = f", about {format_bytes(sum(taken.values()))} of its memory" if any(taken.values()) else ""
    lines = [f"communicators of device {rank}: {len(joined)}{total}"]
    width = max((len(communicator.purpose) for communicator in joined), default=0)
    for communicator in joined:
        devices = ", ".join(map(str, format_devices(communicator.ranks)))
        senders = ", ".join(map(str, format_devices(communicator.senders)))
        sent_by = f", sent by {senders}" if senders else ""
        size = f", {format_bytes(taken[communicator.index])}" if taken[communicator.index] else ""
        lines.append(
            f"  on {communicator.index}  {communicator.purpose:<{width}}  devices {devices}{sent_by}{size}"
        )
    return lines


def _explain(program: Program, rank: int, action: Action) -> str:
    if action.slice_index is not None:
        slice_ = program.slices[action.slice_index]
        first, last = program.layouts[action.slice_index].rows_of(rank)
        shard = f", shard {slice_.devices.index(rank) % slice_.tp} of {slice_.tp}" if slice_.tp > 1 else ""
        way, planned_s = "forward", slice_.start_s
        if action.kind is Kind.BACKWARD:
            way, planned_s = "backward", slice_.times_s[-1][0]
        return f"{slice_.label} {way}, samples {first}:{last}{shard}, planned {format_seconds(planned_s)}"
    if action.transfer is not None:
        transfer = action.transfer
        ends = (program.slices[transfer.producer].label, program.slices[transfer.consumer].label)
        what = "gradient of " if transfer.is_gradient else ""
        return f"{what}{ends[0]}, for {ends[1]}, {format_bytes(transfer.num_bytes)}"
    if action.kind in (Kind.UPDATE, Kind.STEP):
        return _explain_update(program, rank, action)
    if action.group is not None:
        return _explain_group(program, action)
    return _MEANINGS[action.kind]


_MEANINGS = {
    Kind.LOSSES: "the losses of all devices",
    Kind.FLAGS: "which parameters any of these devices has reached",
    Kind.NORM: "wait for all sums, then the norm of all gradients, and whether one has overflowed",
}


def _explain_update(program: Program, rank: int, action: Action) -> str:
    """What an UPDATE, or the STEP, waits for and steps."""
    updates = [update for update in program.actions[rank] if update.kind is Kind.UPDATE]
    if action.kind is Kind.STEP:
        rest = " for the rest" if updates else ""
        return f"wait for everything, then the optimizer{rest}"
    part = program.updates[rank][updates.index(action)]
    waits = f"wait for {counted(len(part.groups), 'sum')}, then " if part.groups else ""
    return f"{waits}the optimizer for {part.share:.0%} of what the device updates"


def _explain_group(program: Program, action: Action) -> str:
    assert action.group is not None, "a SUM or GATHER has a group"
    group = program.groups[action.group]
    keys = dict.fromkeys(key for key, _ in group.blocks)
    names = ", ".join(list(keys)[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
    size = format_bytes(group.moved_bytes)
    blocks = "1 block" if len(group.blocks) == 1 else f"{len(group.blocks)} blocks"
    made_of = f" of {group.summing} gathered" if group.is_gathered else ""
    replica_groups = f" of {len(group.replica_groups)} replica groups" if group.replica_groups else ""
    return f"{names}: {blocks}, {size}{made_of}, over {len(group.devices)} devices{replica_groups}"
