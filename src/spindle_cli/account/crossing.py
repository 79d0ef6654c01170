"""What a slice's devices receive from others: its inputs, and in the backward pass the gradients of its
outputs. A share that lies on the device already is not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from spindle_cli.account.edges import edge_bytes, edges_between, layout_of
from spindle_cli.costs.memory import SliceShape
from spindle_cli.costs.shares.sizes import cuts_by_share
from spindle_cli.profile.types import MetaOp


class Taken(NamedTuple):
    """What a slice takes in from another one: the bytes for the whole batch, the number of the other,
    whether each of its ops takes it, so that its gradient is there from the first that has run backward on,
    and whether each device has made itself what it takes.
    """

    num_bytes: int
    producer: int
    by_every_op: bool
    stays: bool


class Crossings:
    """Between all slices of a plan, which are in the order in which they start."""

    def __init__(self, slices: Sequence[SliceShape], by_name: Mapping[str, MetaOp]) -> None:
        self._slices = slices
        self._by_name = by_name
        self._places: dict[int, dict[int, int]] = {}
        self._sources: list[list[tuple[int, int]]] = [[] for _ in slices]  # of each slice: (bytes, producer)
        self._takers: list[list[tuple[int, int]]] = [[] for _ in slices]  # of each slice: (bytes, consumer)
        self._taken: list[list[Taken]] = [[] for _ in slices]
        self.edges = edges_between(slices, by_name)
        for edge in self.edges:
            producer = slices[edge.producer]
            whole = edge_bytes(producer, edge, by_name)
            of_every_op = by_name[slices[edge.consumer].metaop].inputs_of_every_op
            by_every_op = not edge.inner and producer.metaop in of_every_op
            stays = _place_of(producer) == _place_of(slices[edge.consumer])
            self._taken[edge.consumer].append(Taken(whole, edge.producer, by_every_op, stays))
            self._sources[edge.consumer].append((whole, edge.producer))
            self._takers[edge.producer].append((whole, edge.consumer))

    def received_by(self, index: int) -> list[float] | None:
        """Bytes that each device of a slice receives for it, in the order of its devices; None: nothing."""
        return self._missing(index, self._sources[index])

    def returned_to(self, index: int) -> list[float] | None:
        """The same for the gradients of its outputs: those received, and the sum of several."""
        takers = self._takers[index]
        missing = self._missing(index, takers)
        if len(takers) < 2:
            return missing
        piece, most = self._slices[index], max(num_bytes for num_bytes, _ in takers)
        cuts = cuts_by_share(piece)
        found = missing or [0.0] * len(piece.devices)
        return [size + most / cuts[position // piece.tp] for position, size in enumerate(found)]

    def taken_by(self, index: int) -> list[Taken]:
        """All that a slice takes in from other slices, on whichever devices they are."""
        return self._taken[index]

    def is_handed_on(self, index: int) -> bool:
        """Whether another slice takes what a slice makes."""
        return bool(self._takers[index])

    def _missing(self, index: int, others: Sequence[tuple[int, int]]) -> list[float] | None:
        piece = self._slices[index]
        cuts = cuts_by_share(piece)
        missing: list[float] | None = None
        for num_bytes, other in others:
            has = self._holder(other, piece)
            if has is _EVERYWHERE:
                continue
            missing = missing or [0.0] * len(piece.devices)
            for position, device in enumerate(piece.devices):
                if not has(device, position // piece.tp):
                    missing[position] += num_bytes / cuts[position // piece.tp]
        return missing

    def _holder(self, other: int, piece: SliceShape) -> Callable[[int, int], bool]:
        """Whether a device's share of the slice `other` includes a share of `piece`."""
        source = self._slices[other]
        if _place_of(source) == _place_of(piece):
            return _EVERYWHERE
        if source.rows is not None or piece.rows is not None:
            layouts = layout_of(source, self._by_name), layout_of(piece, self._by_name)
            return lambda device, share: layouts[0].holds(device, *layouts[1].rows(share))
        if other not in self._places:
            self._places[other] = {held: place for place, held in enumerate(source.devices)}
        places = self._places[other]

        def has(device: int, share: int) -> bool:
            place = places.get(device)
            if place is None:
                return False
            own = place // source.tp
            return own * piece.dp <= share * source.dp and (share + 1) * source.dp <= (own + 1) * piece.dp

        return has


def _place_of(piece: SliceShape) -> object:
    return piece.devices, piece.dp, piece.tp, piece.rows


def _EVERYWHERE(_: int, __: int) -> bool:  # noqa: N802 - a constant
    return True
