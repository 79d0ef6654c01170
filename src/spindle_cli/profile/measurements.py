"""What a measured profile says of its measurements: how quiet the machine was, and what was measured of each
op, so that another profile may take it over.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spindle_cli.files.artifact import Model
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.points import Bytes, Devices, PhaseTimes


class Noise(Model):
    """How quiet the machine was while a profile was measured.

    Attributes:
        others_share: of the time of the cores, what other processes took, 0 to 1.
        spread, worst_spread: median over the measurements of their spread (interquartile range over median),
            and the largest.
        measured_again: measurements that were repeated for their spread.
    """

    others_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    spread: Annotated[float, Field(ge=0)] = 0.0
    worst_spread: Annotated[float, Field(ge=0)] = 0.0
    measured_again: Annotated[int, Field(ge=0)] = 0


class SelectiveMemory(Model):
    """What is known of one op on one share of which all but what takes longest is recomputed.

    Attributes:
        kept_bytes: kept from forward to backward, its outputs included.
        share: of its forward pass, what runs again in the backward pass.
    """

    kept_bytes: Bytes
    share: Annotated[float, Field(ge=0, le=1)]


class ShareMemory(Model):
    """Bytes of one op on one share, beside its parameters, its inputs and the batch's fields.

    Attributes:
        kept_bytes: kept from forward to backward, its outputs included.
        forward_bytes: the most while it runs forward, what it keeps included.
        backward_bytes: the most while it runs backward, gradients of its outputs and inputs included, beyond
            what it had kept; gradients of its parameters are added to those that are there.
        first_backward_bytes: the same where there are none yet, with those that it makes.
        selective: where it is recomputed but for what takes longest; None: not looked at, or it saves little.
    """

    kept_bytes: Bytes
    forward_bytes: Bytes
    backward_bytes: Bytes
    first_backward_bytes: Bytes
    selective: SelectiveMemory | None = None


class OpTiming(Model):
    """What is known of one op on one batch share.

    `slowest[n - 1]`: times of the slowest of n processes that run the same share each at the same moment; one
    entry where only one process counts. `activation_bytes`: kept from forward to backward by this share, with
    the fields of the batch. `memory`: what the share takes, where that was looked at. `batch_sums`: what it
    sums with the other shares. `loss_chunks`: how many chunks its loss is computed in.
    """

    slowest: Annotated[tuple[PhaseTimes, ...], Field(min_length=1)]
    activation_bytes: Bytes
    memory: ShareMemory | None = None
    batch_sums: tuple[BatchSum, ...] = ()
    loss_chunks: Annotated[int, Field(ge=1)] = 1

    def on(self, num_devices: int) -> PhaseTimes:
        """Times where `num_devices` run a share each; of as many processes as were measured, if fewer."""
        return self.slowest[min(num_devices, len(self.slowest)) - 1]


class Measurements(Model):
    """What a measured profile's curves are made of, so that another one may take it over.

    Attributes:
        nproc: allocations of up to so many devices were measured on as many processes.
        links: hash of the links that sums of split layers were taken from; None: nothing was split.
        timings: by a key that equal ops on equally many samples have in every workload.
        failed: keys of the shares that did not fit the memory.
    """

    nproc: Devices
    links: str | None = None
    timings: dict[str, OpTiming]
    failed: tuple[str, ...] = ()
