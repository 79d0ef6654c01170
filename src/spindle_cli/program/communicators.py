"""Which communicators a program needs: as few as keep what may not share one apart.

* One of everyone, for what all devices sum.
* Two for messages, activations and gradients alike: the devices that send any are told in two halves, and
  each sends over that of its own half. Messages of one communicator go one after another, so that one that
  waits for its other end holds up those behind it. As far as no two of one half exchange any, a device's
  sends are not held up by what it waits to receive. They take no more memory than any other two that all
  messages go over.
* One for each set of devices that sums gradients; none beside that of everyone for the set of all. Where they
  do so by nodes, one for those of each node, and one for those of the same place in all of these nodes.
* One for each set of devices that gathers parameters, or sums gradients, inside of passes: beside that for
  the sums of whole gradients, which start between them.
* One for each tensor-parallel group, and one for each set of devices whose shares sum the statistics of batch
  norms, even where the same devices sum gradients: those sums start while a pass runs, between the sums that
  the pass itself takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spindle_cli.account.activations import Layout
from spindle_cli.account.traffic import find_communicator_ranks, peers_bytes
from spindle_cli.account.types import ParameterGroup, Purpose
from spindle_cli.costs.links import collectives_bytes
from spindle_cli.program.types import Communicator, Program, Transfer


def find_communicators(
    num_devices: int,
    transfers: Sequence[Transfer],
    groups: Iterable[ParameterGroup],
    layouts: Iterable[Layout],
) -> tuple[Communicator, ...]:
    """All communicators, in the order in which every device makes them."""
    pairs = ((transfer.source, transfer.destination) for transfer in transfers)
    all_ranks = find_communicator_ranks(num_devices, pairs, groups, layouts)
    return tuple(Communicator(index, *ranks) for index, ranks in enumerate(all_ranks))


def communicator_memory(program: Program, device: int) -> dict[int, int]:
    """Bytes of a device's memory that each of its communicators takes, by index; nothing on gloo."""
    cluster = program.plan.cluster
    peers: dict[int, set[int]] = {}
    for action in program.actions[device]:
        if action.transfer is not None and action.communicator is not None:
            peer = action.transfer.source + action.transfer.destination - device
            peers.setdefault(action.communicator, set()).add(peer)
    joined = [communicator for communicator in program.communicators if device in communicator.ranks]
    if cluster.talks_by == "gloo":
        return {communicator.index: 0 for communicator in joined}
    return {
        communicator.index: peers_bytes(device, peers.get(communicator.index, ()), cluster)
        if communicator.purpose is Purpose.MESSAGES
        else collectives_bytes(communicator.ranks, cluster)
        for communicator in joined
    }


class Directory:
    """Communicators by what they are for and whose they are."""

    def __init__(self, communicators: Iterable[Communicator]) -> None:
        self._of: dict[tuple[Purpose, tuple[int, ...]], int] = {}
        self._sent_by: dict[int, int] = {}
        self._everyone = 0
        for communicator in communicators:
            if communicator.purpose is not Purpose.MESSAGES:
                self._of[communicator.purpose, communicator.ranks] = communicator.index
            if communicator.purpose is Purpose.EVERYONE:
                self._everyone = communicator.index
            self._sent_by |= dict.fromkeys(communicator.senders, communicator.index)

    def of_all(self) -> int:
        """Return the communicator of all devices."""
        return self._everyone

    def of_transfer(self, transfer: Transfer) -> int:
        """Return the communicator that a transfer goes over."""
        return self._sent_by[transfer.source]

    def of_sum(self, devices: tuple[int, ...]) -> int:
        """Return the communicator over which these devices, ascending, sum gradients."""
        index = self._of.get((Purpose.SUMS, devices))
        return self._of[Purpose.EVERYONE, devices] if index is None else index

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
