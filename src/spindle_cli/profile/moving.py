"""What messages take, of a link and of the processors at its ends, and what reading samples and the runtime
itself take.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spindle_cli.files.artifact import Model

Seconds = Annotated[float, Field(ge=0, le=1e12)]


class MeasuredLink(Model):
    """A link as measured between two processes.

    Attributes:
        kind: Between devices of one node, or of two.
        latency_s: Seconds before the first byte.
        points: Bytes of a message, and bytes per second.
        message_processor_s: Processor time of one end, sending or receiving, for a message, all threads of
            the process together.
        processor_s_per_byte: The same for each byte.
    """

    kind: Literal["intra_node", "inter_node"]
    latency_s: Seconds
    points: tuple[tuple[int, float], ...]  # (bytes, bytes per second)
    message_processor_s: Seconds = 0.0
    processor_s_per_byte: Seconds = 0.0


class ProcessorCosts(Model):
    """What takes a device's time beside its ops, where the device is a processor that does this work too:
    seconds of the device, the turns of other processes on its core included. All zero where other
    processors do this work.

    Attributes:
        message_s: For each message that it sends or receives.
        s_per_byte: For each byte of these.
        load_s: By task, for each sample that it reads.
        step_s: For each step, whatever it runs: what the runtime does beside a plain PyTorch step.
        pass_s: For each slice that it runs, forward and backward, beside the slice's ops.
    """

    message_s: Seconds = 0.0
    s_per_byte: Seconds = 0.0
    load_s: dict[str, Seconds] = Field(default_factory=dict)
    step_s: Seconds = 0.0
    pass_s: Seconds = 0.0


class RuntimeOverhead(Model):
    """Processor seconds of one device that the runtime takes beside what it runs.

    Attributes:
        step_s: Of each step.
        pass_s: Of each slice that it runs forward and backward.
    """

    step_s: Seconds
    pass_s: Seconds
