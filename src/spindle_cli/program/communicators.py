"""Which communicators a program needs: as few as keep what may not share one apart.

* One of everyone, for what all devices sum.
* One for activations and one for gradients, of the devices that send or receive any: their messages go one
  after another, so that one that waits for its receiver holds up those behind it. A gradient is not held up
  by an activation whose receiver is still busy.
* One for each set of devices that sums gradients; none beside that of everyone for the set of all.
* One for each set of devices that gathers parameters, or sums gradients, inside of passes: beside that for
  the sums of whole gradients, which start between them.
* One for each tensor-parallel group, and one for each set of devices whose shares sum the statistics of batch
  norms, even where the same devices sum gradients: those sums start while a pass runs, between the sums that
  the pass itself takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spindle_cli.account.rows import Layout
from spindle_cli.account.traffic import find_meetings, peers_bytes
from spindle_cli.account.types import ParameterGroup, Purpose
from spindle_cli.costs.communicators import collectives_bytes
from spindle_cli.program.types import Communicator, Program, Transfer


def find_communicators(
    num_devices: int,
    transfers: Sequence[Transfer],
    groups: Iterable[ParameterGroup],
    layouts: Iterable[Layout],
) -> tuple[Communicator, ...]:
    """All communicators, in the order in which every device makes them."""
    pairs = ((transfer.source, transfer.destination) for transfer in transfers)
    found = find_meetings(num_devices, pairs, groups, layouts)
    return tuple(Communicator(index, ranks, purpose) for index, (ranks, purpose) in enumerate(found))


def communicator_memory(program: Program, device: int) -> dict[int, int]:
    """Bytes of a device's memory that each of its communicators takes, by index; nothing on gloo."""
    cluster = program.plan.cluster
    peers: dict[int, set[int]] = {}
    for action in program.actions[device]:
        if action.transfer is not None and action.communicator is not None:
            other = action.transfer.source + action.transfer.destination - device
            peers.setdefault(action.communicator, set()).add(other)
    own = [each for each in program.communicators if device in each.ranks]
    if cluster.talks_by == "gloo":
        return {each.index: 0 for each in own}
    return {
        each.index: peers_bytes(device, peers.get(each.index, ()), cluster)
        if each.purpose in (Purpose.ACTIVATIONS, Purpose.GRADIENTS)
        else collectives_bytes(len(each.ranks))
        for each in own
    }


class Directory:
    """Communicators by what they are for and whose they are."""

    def __init__(self, communicators: Iterable[Communicator]) -> None:
        self._of: dict[tuple[Purpose, tuple[int, ...]], int] = {}
        self._first: dict[Purpose, int] = {}
        for each in communicators:
            self._of[each.purpose, each.ranks] = each.index
            self._first.setdefault(each.purpose, each.index)

    def of_all(self) -> int:
        """What everyone takes part in."""
        return self._first[Purpose.EVERYONE]

    def of_transfer(self, transfer: Transfer) -> int:
        """What a transfer goes over."""
        return self._first[Purpose.GRADIENTS if transfer.is_gradient else Purpose.ACTIVATIONS]

    def of_sum(self, devices: tuple[int, ...]) -> int:
        """What these devices, ascending, sum gradients over."""
        known = self._of.get((Purpose.SUMS, devices))
        return self._of[Purpose.EVERYONE, devices] if known is None else known

    def of_shards(self, devices: tuple[int, ...]) -> int:
        """What these devices, ascending, gather parameters and sum gradients over inside of passes."""
        return self._of[Purpose.SHARDS, devices]

    def of_share(self, layout: Layout, share: int) -> int | None:
        """What the passes of a share sum over inside; None where they sum nothing."""
        partners = layout.partners(share)
        if not partners:
            return None
        purpose = Purpose.STATISTICS if layout.sums_shares else Purpose.TENSOR
        return self._of[purpose, tuple(sorted(partners))]
