"""What a node's torchrun hears of the other nodes while their workers run, over the store that they met at.

Workers on gloo notice within moments that another one is gone, as their connections break. On NCCL a device
waits, and the host finds out when NCCL's watchdog gives up, after the run's whole timeout. So every torchrun
says when it has lost a worker, and that it is there; who hears the one, or nothing for long, ends its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

# A torchrun that says nothing for so long is gone, or cut off: shorter cuts of the network pass.
SILENT_S = 120.0
# How long workers have to notice a loss by themselves: they know more of it.
GRACE_S = 5.0
_BEAT_S = 1.0
# What is said of a lost worker is said in this time, or not at all: the store may be out of reach.
_TOLD_S = 2.0


class OtherNodes:
    """The other nodes of a run, as one of them knows them. A thread listens: the store may not answer."""

    def __init__(
        self, store: Store, rank: int, count: int, *, silent_s: float = SILENT_S, grace_s: float = GRACE_S
    ) -> None:
        """`rank`: of this node, of `count`."""
        self._store = store
        self._rank = rank
        self._others = [node for node in range(count) if node != rank]
        self._silent_s, self._grace_s = silent_s, grace_s
        now_s = time.monotonic()
        self._heard_s = dict.fromkeys(self._others, now_s)
        self._beats = dict.fromkeys(self._others, b"")
        self._lost: tuple[float, str] | None = None  # since when, and what
        if self._others:
            threading.Thread(target=self._listen, name="other-nodes", daemon=True).start()

    def tell_loss(self) -> None:
        """Say that this node has lost a worker."""
        if self._others:
            telling = threading.Thread(target=self._tell, daemon=True)
            telling.start()
            telling.join(_TOLD_S)

    def loss(self) -> str | None:
        """What other nodes have lost, once the workers here have had time to notice; None: nothing."""
        now_s = time.monotonic()
        if self._lost is not None:
            since_s, what = self._lost
            return what if now_s - since_s >= self._grace_s else None
        silent = [node for node, heard_s in self._heard_s.items() if now_s - heard_s >= self._silent_s]
        if not silent:
            return None
        return f"{_named(silent)} said nothing for {self._silent_s:g} s"

    def _tell(self) -> None:
        try:
            self._store.set(_loss_key(self._rank), "1")
        except DistError:  # node 0, which has the store, is gone: the others notice that
            return

    def _listen(self) -> None:
        number = 0
        while self._lost is None:
            number += 1
            try:
                self._store.set(_beat_key(self._rank), str(number))
                self._hear()
            except DistError as error:
                lines = str(error).splitlines() or [""]
                self._lost = time.monotonic(), f"node 0 is gone, where all nodes had met: {lines[0]}"
            time.sleep(_BEAT_S)

    def _hear(self) -> None:
        for node in self._others:
            if self._store.check([_loss_key(node)]):
                self._lost = time.monotonic(), f"{_named([node])} lost a worker"
                return
            if self._store.check([_beat_key(node)]):
                beat = self._store.get(_beat_key(node))
                if beat != self._beats[node]:
                    self._beats[node], self._heard_s[node] = beat, time.monotonic()


def _named(nodes: Sequence[int]) -> str:
    if len(nodes) == 1:
        return f"node {nodes[0]} has"
    return f"nodes {', '.join(map(str, nodes))} have"


def _loss_key(rank: int) -> str:
    return f"lost-{rank}"


def _beat_key(rank: int) -> str:
    return f"beat-{rank}"
