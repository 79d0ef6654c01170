"""The devices of every communicator, and what it is for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spindle_cli.account.meetings.sides import sides_of
from spindle_cli.account.rows import Layout
from spindle_cli.account.types import Meeting, ParameterGroup, Purpose


def find_meetings(
    num_devices: int,
    pairs: Iterable[tuple[int, int]],
    groups: Iterable[ParameterGroup],
    layouts: Iterable[Layout],
) -> tuple[Meeting, ...]:
    """All of them, in the order in which all devices make them.

    Args:
        num_devices: of the cluster.
        pairs: (source, destination) of each message.
        groups: parameters that are summed together.
        layouts: of all slices.
    """
    everyone = tuple(range(num_devices))
    groups = tuple(groups)
    summing = {group.devices for group in groups if len(group.devices) > 1 and group.is_trained} - {everyone}
    summing |= {part for group in groups for part in (*group.nodes, *group.across)}
    sharing = {
        team for group in groups if group.sharding.is_by_pass for team in group.teams or (group.devices,)
    }
    inside = {
        (tuple(sorted(partners)), Purpose.STATISTICS if layout.sums_shares else Purpose.TENSOR)
        for layout in layouts
        for share in range(1 if layout.sums_shares else layout.dp)
        if (partners := layout.partners(share))
    }
    return (
        Meeting(everyone, Purpose.EVERYONE),
        *_exchanging(list(pairs)),
        *(Meeting(ranks, Purpose.SUMS) for ranks in sorted(summing)),
        *(Meeting(ranks, Purpose.SHARDS) for ranks in sorted(sharing)),
        *(Meeting(*each) for each in sorted(inside) if each[1] is Purpose.TENSOR),
        *(Meeting(*each) for each in sorted(inside) if each[1] is Purpose.STATISTICS),
    )


def _exchanging(pairs: Sequence[tuple[int, int]]) -> list[Meeting]:
    """One for what each half of the devices sends, where it sends anything."""
    sides = sides_of(pairs)
    found = []
    for side in (0, 1):
        own = [pair for pair in pairs if sides[pair[0]] == side]
        if own:
            senders = tuple(sorted({source for source, _ in own}))
            ranks = tuple(sorted({device for pair in own for device in pair}))
            found.append(Meeting(ranks, Purpose.MESSAGES, senders))
    return found
