"""A head over a large vocabulary, whole and as one of the devices that share it out has it: memory and time.

    python scripts/bench_vocabulary.py [--words V ...] [--width W] [--tokens T] [--samples N] [--rounds N]
        [--degrees N ...] [--chunks auto|K]

One process trains the head with its cross entropy, forward and backward, in turns whole and in parts of each
degree; what a device would sum with the others is counted, not sent. Prints for each: MiB of the parameters
and their gradients, the peak beyond these and the head's input, processor time of a pass (median over the
rounds), and what a pass sums, of which a part that keeps the head whole sums nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from bench_loss_chunks import Body, Samples, Writer
from torch import Tensor, nn

from spindle_cli.analysis.analyse import analyse
from spindle_cli.operators.heads.chunked import timed_op
from spindle_cli.operators.tensor_parallel import layer_split
from spindle_cli.profile.op.op_memory import live_meter
from spindle_cli.profile.op.split_runs import SumCounter, one_part
from spindle_cli.units import MIB
from spindle_cli.workload.file import LossChunks
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.types import Task, Workload


class Way:
    """The head on one device of `degree`."""

    def __init__(
        self, graph: WorkloadGraph, degree: int, inputs: tuple[Tensor, ...], chunks: LossChunks
    ) -> None:
        task = graph.tasks["write"]
        op = task.ops[-1]
        self.sums = SumCounter((0,), 0, torch.device("cpu"))
        split = layer_split(graph.workload, task, op, degree) if degree > 1 else None
        own = None if split is None else split.vocabulary_shard(self.sums)
        timed = timed_op(task, op, task.task.batch_size, chunks, own)
        module: nn.Module = timed.module if split is None else one_part(timed.module, split, self.sums)
        self._module = timed.called(module)
        self._inputs = inputs
        self.degree = degree
        self.times: list[float] = []

    @property
    def parameters(self) -> list[Tensor]:
        """Of the device."""
        return [parameter for parameter in self._module.parameters() if parameter.numel()]

    def run(self) -> None:
        """Once, forward and backward."""
        started = time.thread_time()
        self._module(*self._inputs).backward()
        self.times.append(time.thread_time() - started)

    def peak(self) -> float:
        """Bytes beyond what is there before."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        with live_meter([*self.parameters, *gradients, *self._inputs])([]) as meter:
            before = meter.held
            meter.begin()
            self.run()
            found: float = meter.peak - before
        self.times.clear()
        return found


def compare(words: int, asked: argparse.Namespace) -> list[str]:
    """The table's lines of one vocabulary."""
    torch.manual_seed(0)
    task = Task("write", Writer(words, asked.width), asked.samples, Samples(words, asked.width, asked.tokens))
    graph = analyse(Workload(name="heads", tasks=[task], operators=(Body,)))
    hidden = torch.randn(asked.samples, asked.tokens, asked.width, requires_grad=True)
    labels = torch.randint(words, (asked.samples, asked.tokens))
    op = graph.tasks["write"].ops[-1]
    inputs = tuple(hidden if name == "hidden" else labels for name in (*op.fields, *op.inputs))
    ways = [Way(graph, degree, inputs, asked.chunks) for degree in (1, *asked.degrees)]
    for way in ways:
        way.run()  # gradients are there from now on
        way.sums.take()
    peaks = [way.peak() for way in ways]
    for _ in range(asked.rounds):
        for way in ways:
            way.run()
    times = [median(way.times) for way in ways]
    lines = []
    for way, peak, seconds in zip(ways, peaks, times, strict=True):
        held = 2 * sum(parameter.nbytes for parameter in way.parameters)
        sums = way.sums.take()
        summed = sum((*sums.forward, *sums.backward)) / (asked.rounds + 1)
        lines.append(
            f"| {words:,} | {way.degree} | {held / MIB:,.1f} | {peak / MIB:,.1f} | {peak / peaks[0]:.2f} "
            f"| {seconds * 1e3:,.1f} | {seconds / times[0]:.2f} | {summed / MIB:.2f} |"
        )
    return lines


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--words", type=int, nargs="+", default=(32_000,), metavar="V")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--degrees", type=int, nargs="+", default=(2, 4), metavar="N")
    number: Callable[[str], LossChunks] = lambda text: "auto" if text == "auto" else int(text)  # noqa: E731
    parser.add_argument("--chunks", type=number, default=1, metavar="auto|K")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| words | tp | parameters and gradients, MiB | peak, MiB | / tp 1 | time, ms | / tp 1 | sums, MiB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for words in asked.words:
        print("\n".join(compare(words, asked)), flush=True)


if __name__ == "__main__":
    main()
