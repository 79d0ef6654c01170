"""What a collective takes of a processor, beside the messages that it is made of.

    python scripts/bench_collectives.py [--processes N ...] [--mib MIB ...] [--rounds N] [--hosts MBIT]

Processes of this machine, connected by gloo, each with a thread and, as far as there are cores, a core of its
own. For every size it takes in turn: messages both ways between two neighbours, a sum that all get
(all-reduce), one of which each gets a part as workers run it (an exchange, then an addition), the addition by
itself, and a gather. Prints, as medians of the rounds, nanoseconds of the first process's processor for each
byte that the collective moves to or from it: what latency and bandwidth cannot say of a collective (GenModel,
arXiv 2409.04202: its additions, its accesses of memory, its fan-in) shows as more than the messages take.

With `--hosts` the processes are one on each of two hosts with so fast a link between them (as root, with
iproute2), and it prints milliseconds instead, of gathers by two other ways as well: gloo's own, and a
broadcast of each range.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from runtime_bench.hosts import ADDRESSES, DEVICE, PORT, require_tools, shape, two_hosts
from torch.multiprocessing.spawn import spawn

from spindle_cli.process.devices import keep_freed_memory
from spindle_cli.runtime.communication.collectives import Members, add_up, start_gather, start_scatter
from spindle_cli.units import MIB

WARM_UP = 3
BYTES_A_ROUND = 64 * MIB  # of the flat tensor, so that every size is timed about as long


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--mib", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hosts", type=int, metavar="MBIT", help="Mbit/s of the link between two hosts")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # of the process that this one is
    arguments = parser.parse_args()
    if arguments.rank is not None:
        _between_hosts(arguments.rank, arguments.mib, arguments.rounds)
        return
    if arguments.hosts is not None:
        _on_two_hosts(arguments.hosts, arguments.mib, arguments.rounds)
        return
    print("| processes | MiB | " + " | ".join(WAYS) + " |")
    print("|---:|---:|" + "---:|" * len(WAYS), flush=True)
    for count in arguments.processes:
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            spawn(_take_part, (count, store, arguments.mib, arguments.rounds), count)  # type: ignore[no-untyped-call]  # torch: untyped


class _Sizes:
    """Tensors of one size, and what is done with them."""

    def __init__(self, rank: int, count: int, num_bytes: int) -> None:
        self.flat = torch.ones(num_bytes // 4 // count * count)
        self.members = Members(count, rank, None)
        self._other = torch.empty_like(self.flat)
        self._parts = torch.ones_like(self.flat).view(count, -1)
        self._own = torch.empty(self._parts.shape[1])
        self._count = count
        self._next, self._before = (rank + 1) % count, (rank - 1) % count

    def messages(self) -> float:
        """One to a neighbour, one from the other. Returns the bytes that were moved, as all do."""
        works = [dist.isend(self.flat, self._next), dist.irecv(self._other, self._before)]
        for work in works:
            assert work is not None, "this rank is a member"
            work.wait()
        return 2.0 * self.flat.nbytes

    def all_reduce(self) -> float:
        dist.all_reduce(self.flat)
        return 2 * self._moved()

    def own_sum(self) -> float:
        start_scatter(self.flat, self.members).finish()
        return self._moved()

    def addition(self) -> float:
        """What `own_sum` adds up; counted for the bytes that it moves."""
        add_up(self._parts, self._own)
        return self._moved()

    def gather(self) -> float:
        start_gather(self.flat, self.members).wait()
        return self._moved()

    def gather_of_gloo(self) -> float:
        dist.all_gather_into_tensor(self.flat, self.members.range_in(self.flat))
        return self._moved()

    def broadcasts(self) -> float:
        """A gather by a broadcast of each range, all started at once."""
        works = [
            dist.broadcast(each, group_src=position, async_op=True)
            for position, each in enumerate(self.members.ranges_in(self.flat))
        ]
        for work in works:
            assert work is not None, "this rank is a member"
            work.wait()
        return self._moved()

    def _moved(self) -> float:
        """To and from a rank, where each of a tensor's parts goes once to, or from, another one."""
        return 2.0 * self.flat.nbytes * (self._count - 1) / self._count


WAYS: dict[str, Callable[[_Sizes], float]] = {
    "messages": _Sizes.messages,
    "all-reduce": _Sizes.all_reduce,
    "own part of a sum": _Sizes.own_sum,
    "its addition": _Sizes.addition,
    "gather": _Sizes.gather,
}


BETWEEN_HOSTS = WAYS | {"gloo's gather": _Sizes.gather_of_gloo, "gather by broadcasts": _Sizes.broadcasts}


def _on_two_hosts(mbit_per_s: int, sizes: list[int], rounds: int) -> None:
    require_tools()
    print("| MiB | " + " | ".join(BETWEEN_HOSTS) + " |")
    print("|---:|" + "---:|" * len(BETWEEN_HOSTS), flush=True)
    with two_hosts() as hosts:
        shape(hosts, mbit_per_s)
        words = [__file__, "--mib", *map(str, sizes), "--rounds", str(rounds), "--rank"]
        ends = [subprocess.Popen(host.command([sys.executable, *words, str(host.rank)])) for host in hosts]
        codes = [end.wait() for end in ends]
        if any(codes):
            raise SystemExit(1)


def _between_hosts(rank: int, sizes: list[int], rounds: int) -> None:
    """One of two processes on hosts of their own."""
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    meet = f"tcp://{ADDRESSES[0]}:{PORT}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=len(ADDRESSES))
    for mib in sizes:
        tensors = _Sizes(rank, len(ADDRESSES), mib * MIB)
        taken: dict[str, list[float]] = {name: [] for name in BETWEEN_HOSTS}
        for _ in range(rounds):
            for name, way in BETWEEN_HOSTS.items():
                dist.barrier()
                begin_s = time.perf_counter()
                way(tensors)
                taken[name].append(time.perf_counter() - begin_s)
        if rank == 0:
            cells = (f"{median(each) * 1e3:.1f}" for each in taken.values())
            print(f"| {mib} | " + " | ".join(cells) + " |", flush=True)
    dist.destroy_process_group()


def _take_part(rank: int, count: int, store: str, sizes: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as workers do
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    for mib in sizes:
        tensors = _Sizes(rank, count, mib * MIB)
        times = max(2, BYTES_A_ROUND // (mib * MIB))
        taken: dict[str, list[float]] = {name: [] for name in WAYS}
        for _ in range(rounds):
            for name, way in WAYS.items():
                taken[name].append(_processor_s_per_byte(tensors, way, times))
        if rank == 0:
            cells = (f"{median(each) * 1e9:.3f}" for each in taken.values())
            print(f"| {count} | {mib} | " + " | ".join(cells) + " |", flush=True)
    dist.destroy_process_group()


def _processor_s_per_byte(tensors: _Sizes, way: Callable[[_Sizes], float], times: int) -> float:
    for _ in range(WARM_UP):
        way(tensors)
    dist.barrier()
    tensors.flat.fill_(1.0)  # sums of sums would overflow
    begin_s = time.process_time()
    moved = sum(way(tensors) for _ in range(times))
    return (time.process_time() - begin_s) / moved


if __name__ == "__main__":
    main()
