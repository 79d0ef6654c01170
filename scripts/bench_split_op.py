"""A layer split over two devices: by Spindle's own sums, and by DTensor's parallel styles.

    python scripts/bench_split_op.py [--widths W ...] [--rows R] [--tokens T] [--rounds N]

Two processes of this machine train one transformer layer, forward and backward, in turns by either way, on
the same shards. Prints medians over the rounds of the slower process, and checks that both find the same
gradients. *Composed* is what `spindle profile --tp 2` rests on: each process's part without any sums, and the
sums by themselves.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from spindle_cli.operators.split_op import PartialOp, SplitRegion, View
from spindle_cli.operators.tensor_group import TensorGroup
from spindle_cli.operators.tensor_parallel import LayerSplit
from spindle_cli.profile.op.split_runs import SumCounter
from spindle_cli.zoo.layers import EncoderLayer

WAYS = ("own sums", "DTensor", "part", "sums")
COLWISE = ("attention.query", "attention.key", "attention.value", "mlp.up")
ROWWISE = ("attention.out", "mlp.down")


def main() -> None:
    """Start two ranks for each width, and print what they found; as a rank, measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=(64, 256, 1024), metavar="W")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.out is not None:
        measure(asked)
        return
    print("| width | own sums, ms | DTensor, ms | DTensor / own | composed, ms | composed / own |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        torchrun.append(f"--log-dir={folder}/logs")
        command = [sys.executable, *torchrun, __file__, *sys.argv[1:], "--out", folder]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
        found = [json.loads((Path(folder) / str(rank)).read_text(encoding="utf-8")) for rank in range(2)]
    for width in asked.widths:
        own, theirs, part, sums = (
            median(max(pair) for pair in zip(*(rank[str(width)][way] for rank in found), strict=True))
            for way in WAYS
        )
        print(
            f"| {width} | {own * 1e3:.2f} | {theirs * 1e3:.2f} | {theirs / own:.2f} "
            f"| {(part + sums) * 1e3:.2f} | {(part + sums) / own:.2f} |"
        )


def measure(asked: argparse.Namespace) -> None:
    """As a rank: seconds of every round, by width and way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    found: dict[int, dict[str, list[float]]] = {}
    for width in asked.widths:
        torch.manual_seed(0)
        layer = EncoderLayer(width, 4)
        x = torch.randn(asked.rows, asked.tokens, width)
        counter = SumCounter((0, 1), dist.get_rank(), torch.device("cpu"))
        steps: dict[str, Callable[[], Tensor | None]] = {
            "own sums": partial(step, own_layer(layer, real_group()), x),
            "DTensor": partial(step, dtensor_layer(copy.deepcopy(layer), mesh), x),
            "part": partial(step, own_layer(copy.deepcopy(layer), counter), x),
        }
        steps["part"]()
        sums = counter.take()
        summed = [torch.zeros(size // 4) for size in (*sums.forward, *sums.backward)]
        steps["sums"] = partial(sum_all, summed)
        for _ in range(3):
            own, other = (steps[way]() for way in WAYS[:2])
        assert own is not None and other is not None
        assert torch.allclose(own, other, atol=1e-5), "both ways find the same gradient of the input"
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(asked.rounds):
            for way in WAYS:
                dist.barrier()
                begin = time.perf_counter()
                steps[way]()
                seconds[way].append(time.perf_counter() - begin)
        found[width] = seconds
    (asked.out / str(dist.get_rank())).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def step(module: nn.Module, x: Tensor) -> Tensor:
    """Forward and backward; the gradient of the input."""
    taken = x.detach().requires_grad_()
    module(taken).square().mean().backward()
    assert taken.grad is not None
    return taken.grad.to_local() if isinstance(taken.grad, DTensor) else taken.grad


def sum_all(tensors: Sequence[Tensor]) -> None:
    """The sums of a step, one after the other."""
    for tensor in tensors:
        dist.all_reduce(tensor)


def real_group() -> TensorGroup:
    """Both ranks."""
    group = TensorGroup((0, 1), dist.get_rank(), torch.device("cpu"))
    group.join(dist.group.WORLD)
    return group


def own_layer(layer: nn.Module, group: TensorGroup) -> nn.Module:
    """This rank's half, as the runtime runs it."""
    rank = dist.get_rank()
    dims = {f"{name}.weight": 0 for name in COLWISE} | {f"{name}.weight": 1 for name in ROWWISE}
    names = dict(layer.named_parameters())
    dims |= {f"{name}.bias": 0 for name in COLWISE if f"{name}.bias" in names}
    split = LayerSplit(2, dims, COLWISE, ROWWISE, frozenset(f"{name}.bias" for name in ROWWISE))
    views: dict[str, View] = {}
    for name, parameter in names.items():
        if name in dims:
            width = parameter.shape[dims[name]] // 2
            part = parameter.detach().narrow(dims[name], rank * width, width).clone()
            views[name] = View((nn.Parameter(part),), dims[name])
        elif rank > 0:
            views[name] = View((parameter,), counts=False, is_zero=name in split.added_once)
    return PartialOp(layer, views, SplitRegion(layer, split, group))


def dtensor_layer(layer: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The same by torch's own styles."""
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLWISE}
    plan |= {name: RowwiseParallel() for name in ROWWISE}
    return parallelize_module(layer, mesh, plan)


if __name__ == "__main__":
    main()
