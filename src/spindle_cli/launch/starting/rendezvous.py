"""Where the nodes' torchrun processes and their workers meet: one TCP store on node 0."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from spindle_cli.launch.starting.network import listen

# Seconds for every node to be started by hand or by a job scheduler.
JOIN_TIMEOUT_S = 900
_MEETING = "meeting"
_RETRY_S = 0.3


class MeetingError(Exception):
    """The nodes have not met in time."""


class BoundRendezvous(RendezvousHandler):
    """A fixed number of nodes with fixed ranks, whose store listens on `host` alone.

    Node 0 holds the store. `port` 0 lets the kernel choose, for one node only: no other node would know it.
    Every meeting has a name of its own. When a run is started again, another node may be there before node
    0's earlier store has closed: the name of the meeting it last took part in is in `meeting_file`, and it
    waits for another one.
    """

    def __init__(
        self, host: str, port: int, rank: int, num_nodes: int, join_timeout_s: float, meeting_file: Path
    ) -> None:
        self._host, self._port = host, port
        self._rank, self._num_nodes = rank, num_nodes
        self._join_timeout_s = join_timeout_s
        self._meeting_file = meeting_file
        self._meeting = ""
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Name of this kind of rendezvous on torchrun's command line."""
        return "spindle"

    @property
    def use_agent_store(self) -> bool:
        """Workers are clients of this store; none opens one of its own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open or join the store.

        Raises:
            OSError: node 0 cannot listen on the address: it is not its own, or the port is taken.
            MeetingError: other nodes have not come in time.
        """
        if self._store is None:
            self._store = self._open() if self._rank == 0 else self._join()
            self._meeting_file.write_text(self._meeting)
            self._store.set_timeout(timedelta(seconds=JOIN_TIMEOUT_S))
        address = RendezvousStoreInfo(self._host, self._store.port)
        return RendezvousInfo(PrefixStore(self._meeting, self._store), self._rank, self._num_nodes, address)

    def _open(self) -> TCPStore:
        listener = listen(self._host, self._port)
        port = listener.getsockname()[1]
        store = TCPStore(
            self._host,
            port,
            None,
            True,
            timedelta(seconds=self._join_timeout_s),
            False,
            master_listen_fd=listener.detach(),
        )
        self._meeting = uuid.uuid4().hex
        store.set(_MEETING, self._meeting)
        missing = [f"{self._meeting}-{rank}" for rank in range(1, self._num_nodes)]
        try:
            store.wait(missing, timedelta(seconds=self._join_timeout_s))
        except DistError as error:
            raise MeetingError(
                f"{self._num_nodes - 1} other nodes were expected at {self._host}:{port} within "
                f"{self._join_timeout_s:g} s; not all of them came"
            ) from error
        return store

    def _join(self) -> TCPStore:
        before = self._meeting_file.read_text() if self._meeting_file.exists() else ""
        give_up_at = time.monotonic() + self._join_timeout_s
        while (left_s := give_up_at - time.monotonic()) > 0:
            try:
                timeout = timedelta(seconds=max(left_s, 1))
                store = TCPStore(self._host, self._port, None, False, timeout, False)
                self._meeting = store.get(_MEETING).decode()
                if self._meeting != before:
                    store.set(f"{self._meeting}-{self._rank}", "here")
                    return store
            except DistError:  # not there yet, or about to close
                pass
            time.sleep(_RETRY_S)
        raise MeetingError(
            f"node 0 was not met at {self._host}:{self._port} within {self._join_timeout_s:g} s"
        )

    def is_closed(self) -> bool:
        """Never: the nodes are fixed."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: the nodes are fixed."""

    def num_nodes_waiting(self) -> int:
        """None: no node can join later."""
        return 0

    def get_run_id(self) -> str:
        """Return the meeting's name."""
        return self._meeting

    def shutdown(self) -> bool:
        """The store ends with its process."""
        return True


def create_rendezvous(meeting_file: Path, parameters: RendezvousParameters) -> BoundRendezvous:
    """Torchrun's way to make one: `--rdzv-endpoint=HOST:PORT --rdzv-conf=rank=R[,join_timeout=S]`."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    rank, join_timeout_s = (
        parameters.get_as_int("rank"),
        parameters.get_as_int("join_timeout", JOIN_TIMEOUT_S),
    )
    assert rank is not None and join_timeout_s is not None and port >= 0
    return BoundRendezvous(host, port, rank, parameters.max_nodes, join_timeout_s, meeting_file)
