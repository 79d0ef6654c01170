"""What messages take, of a link and of the processors at its ends, and what reading samples takes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spindle_cli.files.artifact import Model

Seconds = Annotated[float, Field(ge=0, le=1e12)]


class MeasuredLink(Model):
    """A link as measured between two processes: seconds and bytes per second by message size.

    `message_processor_s`, `processor_s_per_byte`: processor time of one end, sending or receiving, for a
    message and for each of its bytes, all threads of the process together.
    """

    kind: Literal["intra_node", "inter_node"]
    latency_s: Seconds
    points: tuple[tuple[int, float], ...]  # (bytes, bytes per second)
    message_processor_s: Seconds = 0.0
    processor_s_per_byte: Seconds = 0.0


class ProcessorCosts(Model):
    """What takes a device's time beside its ops, where the device is a processor that does this work too.

    Seconds of the device, the turns of other processes on its core included. `message_s`, `s_per_byte`: for
    each message that it sends or receives, and for each of its bytes. `load_s`: by task, for each sample that
    it reads. All zero where other processors do this work, as those of a GPU's host.
    """

    message_s: Seconds = 0.0
    s_per_byte: Seconds = 0.0
    load_s: dict[str, Seconds] = Field(default_factory=dict)
