"""Which communicators a program needs: as few as keep what may not share one apart.

* One of everyone, for what all devices sum.
* One for activations and one for gradients, of the devices that send or receive any: their messages go one
  after another, so that one that waits for its receiver holds up those behind it. A gradient is not held up
  by an activation whose receiver is still busy.
* One for each set of devices that sums gradients; none beside that of everyone for the set of all.
* One for each tensor-parallel group, even where the same devices sum gradients: those sums start while a pass
  runs, between the sums that the pass itself takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spindle_cli.account.rows import Layout
from spindle_cli.account.types import ParameterGroup
from spindle_cli.program.types import Communicator, Purpose, Transfer


def find_communicators(
    num_devices: int,
    transfers: Sequence[Transfer],
    groups: Iterable[ParameterGroup],
    layouts: Iterable[Layout],
) -> tuple[Communicator, ...]:
    """All communicators, in the order in which every device makes them."""
    everyone = tuple(range(num_devices))
    ends = {device for transfer in transfers for device in (transfer.source, transfer.destination)}
    exchanging = [tuple(sorted(ends))] if ends else []
    summing = {group.devices for group in groups if len(group.devices) > 1} - {everyone}
    splitting = {
        tuple(sorted(layout.holders(share)))
        for layout in layouts
        if layout.tp > 1
        for share in range(layout.dp)
    }
    found = [
        (everyone, Purpose.EVERYONE),
        *((ranks, Purpose.ACTIVATIONS) for ranks in exchanging),
        *((ranks, Purpose.GRADIENTS) for ranks in exchanging),
        *((ranks, Purpose.SUMS) for ranks in sorted(summing)),
        *((ranks, Purpose.TENSOR) for ranks in sorted(splitting)),
    ]
    return tuple(Communicator(index, ranks, purpose) for index, (ranks, purpose) in enumerate(found))


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

    def of_share(self, layout: Layout, share: int) -> int | None:
        """What the devices that hold a share sum over; None where it is one device."""
        if layout.tp == 1:
            return None
        return self._of[Purpose.TENSOR, tuple(sorted(layout.holders(share)))]
