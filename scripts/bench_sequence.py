"""Layers split by tensor parallelism, with the whole sequence between their parts and with a part of it.

    python scripts/bench_sequence.py [--layers N] [--width W] [--heads H] [--tokens T] [--samples N]
        [--rounds N] [--degrees N ...]

One process runs one device's part of a run of zoo layers (RMS norms, rotary attention, gated MLP), forward
and backward, in turns with the whole sequence and with its own positions; what it would exchange with the
others is counted, not sent. Prints for each: MiB kept from forward to backward, the peak of activations, both
beyond the parameters, their gradients and the layers' input, processor time of a pass (median of the rounds),
and what a pass moves: a sum as two rounds of its bytes, a gather or a scatter as one.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli import Task, Workload
from spindle_cli.analysis.analyse import analyse
from spindle_cli.operators.tensor_parallel import layer_split
from spindle_cli.profile.op.op_memory import LiveBytes
from spindle_cli.profile.op.split_runs import SumCounter, one_part
from spindle_cli.profile.op.tensor_parallel import OwnPositions, tensors_of
from spindle_cli.units import MIB
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.zoo.layers import TP_PLANS, LanguageLayer


class Stack(nn.Module):
    """Layers, and something to train them by."""

    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__()
        hidden = 8 * asked.width // 3 // 8 * 8
        layers = (LanguageLayer(asked.width, asked.heads, hidden) for _ in range(asked.layers + 2))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Of a trunk [samples, tokens, width]."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Way:
    """The inner layers on one device of `degree`, with its own positions of the sequence or all."""

    def __init__(self, graph: WorkloadGraph, degree: int, trunk: Tensor, *, shared: bool) -> None:
        task = graph.tasks["stack"]
        self.name, self.degree = ("parts" if shared else "whole"), degree
        self.sums = SumCounter((0,), 0, torch.device("cpu"))
        self.times: list[float] = []
        self._ops: list[nn.Module] = []
        for op in task.ops[1:-1]:
            split = layer_split(graph.workload, task, op, degree)
            assert split is not None
            assert split.sequence is not None
            split = split if shared else replace(split, sequence=None)
            self._ops.append(one_part(task.op_module(op), split, self.sums))
            self._positions = OwnPositions(split, self.sums, [trunk])
        self.inputs = self._positions.inputs

    def held(self) -> list[Tensor]:
        """Parameters, their gradients, and the input."""
        parameters = [p for op in self._ops for p in op.parameters() if p.numel()]
        return [*parameters, *(p.grad for p in parameters if p.grad is not None), *self.inputs]

    def forward(self) -> Tensor:
        """The last layer's output."""
        x: Any = self.inputs[0]
        for op in self._ops:
            (x,) = tensors_of(op(*self._positions.given([x])))
        out: Tensor = x
        return out

    def run(self) -> None:
        """Once, forward and backward."""
        started = time.thread_time()
        out = self.forward()
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]  # torch: untyped
        self.times.append(time.thread_time() - started)
        self.inputs[0].grad = None

    def memory(self) -> tuple[float, float]:
        """Bytes kept from forward to backward, and at the fullest moment."""
        with LiveBytes(self.held()) as meter:
            before = meter.held
            meter.begin()
            out = self.forward()
            kept = meter.held - before
            out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]  # torch: untyped
            peak = meter.peak - before
        self.inputs[0].grad = None
        return kept, peak

    def moved(self, passes: int) -> float:
        """Bytes of a pass."""
        sums = self.sums.take()
        along = sum((*sums.forward_along, *sums.backward_along))
        return (2 * sum((*sums.forward, *sums.backward)) + along) / passes


def compare(asked: argparse.Namespace) -> list[str]:
    """The table's lines."""
    torch.manual_seed(0)
    items = [{"x": torch.zeros(asked.tokens, asked.width)}] * asked.samples
    task = Task("stack", Stack(asked), asked.samples, items)
    graph = analyse(Workload("long", [task], operators=(LanguageLayer,), tp_plans=TP_PLANS, tp_sequence=True))
    trunk = torch.randn(asked.samples, asked.tokens, asked.width, requires_grad=True)
    ways = [Way(graph, degree, trunk, shared=shared) for degree in asked.degrees for shared in (False, True)]
    for way in ways:
        way.run()  # gradients are there from now on
    found = [way.memory() for way in ways]
    for way in ways:
        way.times.clear()
    counted = [way.moved(1) for way in ways]
    for _ in range(asked.rounds):
        for way in ways:
            way.run()
    lines = []
    for index, (way, (kept, peak)) in enumerate(zip(ways, found, strict=True)):
        whole = index - index % 2
        passes = asked.rounds
        moved = (way.moved(1) - counted[index]) / passes
        seconds, of_whole = median(way.times), median(ways[whole].times)
        lines.append(
            f"| {way.degree} | {way.name} | {kept / MIB:,.1f} | {kept / found[whole][0]:.2f} "
            f"| {peak / MIB:,.1f} | {peak / found[whole][1]:.2f} "
            f"| {seconds * 1e3:,.0f} | {seconds / of_whole:.2f} | {moved / MIB:.1f} |"
        )
    return lines


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--degrees", type=int, nargs="+", default=(2, 4), metavar="N")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| tp | sequence | kept, MiB | / whole | peak, MiB | / whole | time, ms | / whole | moved, MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(compare(asked)), flush=True)


if __name__ == "__main__":
    main()
