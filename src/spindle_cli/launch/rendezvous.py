"""Where the nodes' torchrun processes and their workers meet: one TCP store on node 0."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from spindle_cli.launch.network import listen

# Seconds for every node to be started by hand or by a job scheduler.
JOIN_TIMEOUT_S = 900


class BoundRendezvous(RendezvousHandler):
    """A fixed number of nodes with fixed ranks, whose store listens on `host` alone.

    Node 0 holds the store. `port` 0 lets the kernel choose, for one node only: no other node would know it.
    """

    def __init__(self, host: str, port: int, rank: int, num_nodes: int, run_id: str) -> None:
        self._host, self._port = host, port
        self._rank, self._num_nodes, self._run_id = rank, num_nodes, run_id
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
        """
        if self._store is None:
            self._store = self._open()
        address = RendezvousStoreInfo(self._host, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), self._rank, self._num_nodes, address)

    def _open(self) -> TCPStore:
        timeout = timedelta(seconds=JOIN_TIMEOUT_S)
        if self._rank != 0:
            return TCPStore(self._host, self._port, self._num_nodes, False, timeout)
        listener = listen(self._host, self._port)
        port = listener.getsockname()[1]
        return TCPStore(self._host, port, self._num_nodes, True, timeout, master_listen_fd=listener.detach())

    def is_closed(self) -> bool:
        """Never: the nodes are fixed."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: the nodes are fixed."""

    def num_nodes_waiting(self) -> int:
        """None: no node can join later."""
        return 0

    def get_run_id(self) -> str:
        """Torchrun's id of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with its process."""
        return True


def create_rendezvous(parameters: RendezvousParameters) -> BoundRendezvous:
    """Torchrun's way to make one: `--rdzv-endpoint=HOST:PORT --rdzv-conf=rank=R`."""
    host, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    rank = parameters.get_as_int("rank")
    assert rank is not None and port >= 0
    return BoundRendezvous(host, port, rank, parameters.max_nodes, parameters.run_id)
