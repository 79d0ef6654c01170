"""Several ranks on one GPU, without any of a plan: NCCL's operations as the runtime uses them.

    python -m gpu_bench.ranks operations|groups|lost cuda|cpu [--ranks N]

* operations: all-reduce, batched sends both ways, gathers and scatters of uneven ranges, a group that is
  split off.
* groups: twenty groups that are split from one, with and without sharing the parent's resources
  (`split_share`): the memory that each way takes, and all-reduces of the groups in turn.
* lost: one rank is killed; the others' wait ends with an error, or with their process.

On a CPU gloo stands for NCCL, where what only NCCL has is left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from gpu_bench.probe import report, require
from spindle_cli.process.devices import gpu_of, sharing_settings
from spindle_cli.process.environment import RANKS_PER_GPU_VARIABLE, join_environment
from spindle_cli.units import MIB

GROUPS, ROUNDS = 20, 3
TIMEOUT_S = 15


def all_reduce(device: torch.device, rank: int, size: int) -> str:
    """Of small and of large tensors."""
    for elements in (1, 2**20):
        values = torch.full((elements,), float(rank + 1), device=device)
        dist.all_reduce(values)
        require((values == size * (size + 1) / 2).all(), f"a sum of {elements} elements is wrong")
    begun_s = time.perf_counter()
    small, count = torch.ones(1, device=device), 20
    for _ in range(count):
        dist.all_reduce(small)
    small.item()
    return f"{size} ranks; {(time.perf_counter() - begun_s) / count * 1e3:.2f} ms a small one"


def batched_sends(device: torch.device, rank: int, size: int) -> str:
    """To the next rank and to the one before, as one call."""
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = [torch.full((2**20,), float(10 * rank + way), device=device) for way in (0, 1)]
    received = [torch.empty(2**20, device=device) for _ in (0, 1)]
    operations = [
        dist.P2POp(dist.isend, sent[0], after),
        dist.P2POp(dist.isend, sent[1], before),
        dist.P2POp(dist.irecv, received[0], before),
        dist.P2POp(dist.irecv, received[1], after),
    ]
    if size == 2:  # both come from one: in the order in which they were sent
        operations[2:] = [dist.P2POp(dist.irecv, each, before) for each in received]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    require((received[0] == 10 * before).all(), "what came from before is wrong")
    require((received[1] == 10 * after + 1).all(), "what came from behind is wrong")
    return "4 MiB each way"


def uneven_ranges(device: torch.device, rank: int, size: int) -> str:
    """An all-gather and a reduce-scatter of ranges of other sizes each."""
    sizes = [1000 * (number + 1) for number in range(size)]
    if device.type == "cpu":
        return "left out: gloo has none"
    parts = [torch.zeros(each, device=device) for each in sizes]
    parts[rank].fill_(float(rank + 1))
    dist.all_gather(parts, parts[rank].clone())
    for number, part in enumerate(parts):
        require((part == number + 1).all(), f"the range of rank {number} is wrong")
    whole = [torch.full((each,), float(rank + 1), device=device) for each in sizes]
    mine = torch.empty(sizes[rank], device=device)
    dist.reduce_scatter(mine, whole)
    require((mine == size * (size + 1) / 2).all(), "the scattered sum is wrong")
    return f"ranges of {', '.join(map(str, sizes))} elements"


def split_off(device: torch.device, rank: int, size: int) -> str:
    """A group of all but the last rank, split from the world's communicator where that can be."""
    members = list(range(max(1, size - 1)))
    group = dist.new_group(members)
    if rank in members:
        values = torch.ones(1000, device=device)
        dist.all_reduce(values, group=group)
        require((values == len(members)).all(), "the sum of the split group is wrong")
    return f"a group of {len(members)} of {size}"


def twenty_groups(device: torch.device, rank: int, size: int, *, shares: bool) -> str:
    """Groups of all ranks, split from the world's; their sums, in one order on all ranks."""
    before = _free(device)
    begun_s = time.perf_counter()
    groups = []
    for number in range(GROUPS):
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options.config.split_share = int(shares)  # type: ignore[attr-defined]  # torch's stubs leave it out
            group = dist.split_group(
                split_ranks=[list(range(size))], pg_options=options, group_desc=f"{shares}-{number}"
            )
        else:
            group = dist.new_group(list(range(size)))
        groups.append(group)
    for _ in range(ROUNDS):
        for group in groups:
            values = torch.full((2**18,), float(rank + 1), device=device)
            work = dist.all_reduce(values, group=group, async_op=True)
            assert work is not None
            work.wait()
            require((values == size * (size + 1) / 2).all(), "a sum is wrong")
    taken = (before - _free(device)) / MIB
    seconds = time.perf_counter() - begun_s
    for group in groups:
        dist.destroy_process_group(group)
    return f"{taken:.0f} MiB of the device by all ranks, {seconds:.1f} s"


def _free(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    dist.barrier()
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info(device)[0])


Check = Callable[[torch.device, int, int], str]
OPERATIONS: dict[str, Check] = {
    "all-reduce": all_reduce,
    "batched sends": batched_sends,
    "uneven gather and scatter": uneven_ranges,
    "split": split_off,
}
SPLITS: dict[str, Check] = {
    f"{GROUPS} groups, {'shared' if shares else 'own'} resources": partial(twenty_groups, shares=shares)
    for shares in (False, True)
}


@contextmanager
def joined(rank: int, size: int, kind: str, store: Path) -> Iterator[torch.device]:
    """A rank in the world of all, on its device; all ranks have the first GPU, where there is but one."""
    join_environment({RANKS_PER_GPU_VARIABLE: str(size)})
    join_environment(sharing_settings(rank))
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", gpu_of(rank))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=device if kind == "cuda" else None,
    )
    yield device
    dist.destroy_process_group()


def checks_of_rank(rank: int, size: int, kind: str, what: str, store: Path) -> None:
    """One rank's checks; the first says what was found."""
    torch.set_num_threads(1)
    with joined(rank, size, kind, store) as device:
        checks = OPERATIONS if what == "operations" else SPLITS
        if rank == 0:
            code = report({name: partial(check, device, rank, size) for name, check in checks.items()})
        else:
            for check in checks.values():
                check(device, rank, size)
            code = 0
    sys.exit(code)


def lose_a_rank(rank: int, size: int, kind: str, store: Path) -> None:
    """The last rank dies; the others wait for it in a sum. What NCCL's watchdog writes of it takes a minute,
    and is left out.
    """
    join_environment({"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"})
    with joined(rank, size, kind, store) as device:
        values = torch.ones(1, device=device)
        dist.all_reduce(values)
        values.item()
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(values)
        values.item()
    print("the sum with a dead rank ended well", file=sys.stderr)


def lost(size: int, kind: str) -> str:
    """Every rank ends, and none with success, within the timeout and what it takes to notice."""
    begun_s = time.perf_counter()
    codes = run_ranks(size, partial(_lost_rank, size, kind), 3 * TIMEOUT_S)
    require(0 not in codes, f"exit codes {codes}")
    return f"exit codes {', '.join(map(str, codes))} after {time.perf_counter() - begun_s:.0f} s"


def _lost_rank(size: int, kind: str, rank: int, store: Path) -> None:
    lose_a_rank(rank, size, kind, store)


def _checked_rank(size: int, kind: str, what: str, rank: int, store: Path) -> None:
    checks_of_rank(rank, size, kind, what, store)


def run_ranks(size: int, work: Callable[[int, Path], None], limit_s: float) -> list[int]:
    """Exit codes of processes that do so; those that have not ended in time are killed.

    Raises:
        RuntimeError: some had not ended.
    """
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        ranks = [context.Process(target=work, args=(rank, Path(folder) / "store")) for rank in range(size)]
        for each in ranks:
            each.start()
        until_s = time.monotonic() + limit_s
        for each in ranks:
            each.join(max(0.1, until_s - time.monotonic()))
        late = [number for number, each in enumerate(ranks) if each.is_alive()]
        for each in ranks:
            each.kill()
            each.join()
    if late:
        raise RuntimeError(f"ranks {late} have not ended in {limit_s:.0f} s")
    return [each.exitcode or 0 for each in ranks]


def main() -> int:
    """Make the checks asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("operations", "groups", "lost"))
    parser.add_argument("kind", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    if asked.what == "lost":
        return report({"a rank is killed": partial(lost, asked.ranks, asked.kind)})
    codes = run_ranks(asked.ranks, partial(_checked_rank, asked.ranks, asked.kind, asked.what), 120)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
