"""Which address and network interface the workers use: loopback, unless the user names other nodes."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from spindle_cli.errors import UsageError
from spindle_cli.files.cluster import Cluster
from spindle_cli.launch.types import Address, NodeShare
from spindle_cli.process import environment

LOOPBACK = "127.0.0.1"


def parse_master(text: str) -> Address:
    """'HOST:PORT' or '[IPV6]:PORT'.

    Raises:
        UsageError: no host, or no port from 1 to 65535.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 2**16):
        raise UsageError(
            f"--master {text!r}: expected HOST:PORT with a port from 1 to 65535",
            hint="HOST is an address of node 0 that every node can reach, e.g. --master 10.0.0.1:29500",
        )
    return Address(host, int(port))


def whole_cluster_here(cluster: Cluster) -> NodeShare:
    """All devices of a cluster as processes of this machine, whatever nodes the plan has."""
    return NodeShare(0, 1, cluster.num_devices, Address(LOOPBACK, 0), interface_of(LOOPBACK))


def share_of_node(cluster: Cluster, node_rank: int | None, master: str | None) -> NodeShare:
    """This node's share of a run over the cluster's nodes.

    Raises:
        UsageError: `node_rank` and `master` are missing for several nodes, given for one, or wrong.
    """
    sizes = cluster.node_sizes
    if len(sizes) == 1:
        if node_rank not in (None, 0) or master is not None:
            raise UsageError(
                f"the plan's cluster {cluster.name!r} has one node; --node-rank and --master are for several",
                hint="Leave them out, or make the plan for a cluster file with several nodes.",
            )
        return whole_cluster_here(cluster)
    if node_rank is None or master is None:
        raise UsageError(
            f"the plan's cluster {cluster.name!r} has {len(sizes)} nodes; expected --node-rank and --master",
            hint=f"Run the same command on each node, with --node-rank 0 to {len(sizes) - 1} and "
            "--master HOST:PORT, HOST being an address of node 0.",
        )
    if not 0 <= node_rank < len(sizes):
        raise UsageError(f"--node-rank {node_rank}: the plan's nodes are 0 to {len(sizes) - 1}")
    address = parse_master(master)
    return NodeShare(node_rank, len(sizes), sizes[node_rank], address, interface_towards(address))


def interface_towards(master: Address) -> str:
    """The interface through which this node reaches the master; on node 0, the one that has its address.

    Raises:
        UsageError: the host is unknown, unreachable, or a name that means this very machine on each node.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(master.host, master.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: it only asks the kernel for the route
            local = str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"--master {master}: this node cannot reach it: {error.strerror or error}",
            hint="Give an address of node 0 in the network between the nodes.",
        ) from error
    if ipaddress.ip_address(local).is_loopback and not is_loopback(master.host):
        raise UsageError(
            f"--master {master}: on this node {master.host!r} is the loopback address {target[0]}, "
            "which no other node can reach",
            hint="Give node 0's address in the network between the nodes, e.g. --master 10.0.0.1:29500",
        )
    return interface_of(local)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interface_of(address: str, interfaces: Mapping[str, list[psutil._ntuples.snicaddr]] | None = None) -> str:
    """The user's own choice (GLOO_SOCKET_IFNAME), else the interface that has this address.

    Raises:
        UsageError: no interface has it.
    """
    chosen = environment.chosen_interface()
    if chosen is not None:
        return chosen
    wanted = ipaddress.ip_address(address)
    for name, entries in (psutil.net_if_addrs() if interfaces is None else interfaces).items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and _same(entry.address, wanted):
                return name
    raise UsageError(
        f"no network interface of this machine has the address {address}",
        hint="Set GLOO_SOCKET_IFNAME to the interface to use; `ip address` lists them.",
    )


def _same(text: str, wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return ipaddress.ip_address(text.partition("%")[0]) == wanted


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on one address of this machine.

    Raises:
        OSError: the host is unknown or not this machine's, or the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def require_address(share: NodeShare) -> None:
    """Make sure that node 0 can listen where the nodes are to meet; other nodes have nothing to check.

    Raises:
        UsageError: the address is not this machine's, or the port is taken.
    """
    if share.rank != 0:
        return
    try:
        listen(share.master.host, share.master.port).close()
    except OSError as error:
        raise UsageError(
            f"--master {share.master}: node 0 cannot listen there: {error.strerror or error}",
            hint="Give an address of node 0 itself, and a port that nothing else uses.",
        ) from error
