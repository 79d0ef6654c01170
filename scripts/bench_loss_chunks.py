"""A head over a large vocabulary and its loss, in one go and in chunks: peak memory and time.

    python scripts/bench_loss_chunks.py [--words V ...] [--width W] [--tokens T] [--samples N] [--rounds N]
        [--chunks auto|K ...] [--device cpu|cuda] [--autocast]

One process trains a projection onto the vocabulary with a cross entropy behind it, forward and backward, in
turns by either way. Prints the median over the rounds of each, the peak bytes beyond what is there before
(parameters, their gradients, the head's input), and the ratios to one go.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from spindle_cli.analysis.analyse import analyse
from spindle_cli.operators.heads.chunked import TimedOp, timed_op
from spindle_cli.profile.op.op_memory import cuda_meter, live_meter
from spindle_cli.units import MIB
from spindle_cli.workload.file import LossChunks
from spindle_cli.workload.types import Task, Workload


class Body(nn.Module):
    """Stands for the layers before the head."""

    def forward(self, hidden: Tensor) -> Tensor:
        """The same."""
        return hidden * 1.0


class Writer(nn.Module):
    """Hidden states to a loss over the vocabulary."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The mean over all labels that count."""
        logits = self.head(self.body(hidden)).float()
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Samples(Dataset[dict[str, Tensor]]):
    """Random ones."""

    def __init__(self, words: int, width: int, tokens: int) -> None:
        self._sizes = words, width, tokens

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words, width, tokens = self._sizes
        drawn = torch.Generator().manual_seed(index)
        return {
            "hidden": torch.randn(tokens, width, generator=drawn),
            "labels": torch.randint(words, (tokens,), generator=drawn),
        }


class Way:
    """The head as one setting has it."""

    def __init__(self, op: TimedOp, inputs: tuple[Tensor, ...], asked: argparse.Namespace) -> None:
        self._op = op
        self._module = op.called(op.module)
        self._inputs = inputs
        self._asked = asked
        self.times: list[float] = []
        self.loss_chunks = op.loss_chunks

    def run(self) -> None:
        """Once, forward and backward."""
        self._wait()
        started = time.perf_counter()
        autocast: Any = nullcontext()
        if self._asked.autocast:
            autocast = torch.autocast(self._asked.device, torch.bfloat16)
        with autocast:
            loss = self._module(*self._inputs)
        loss.backward()
        self._wait()
        self.times.append(time.perf_counter() - started)

    def peak(self) -> float:
        """Bytes beyond what is there before."""
        parameters = list(self._op.module.parameters())
        known = [*parameters, *self._inputs, *(p.grad for p in parameters if p.grad is not None)]
        is_cuda = self._asked.device == "cuda"
        meter = (cuda_meter if is_cuda else live_meter([t.detach() for t in known]))([])
        with meter:
            before = meter.held
            meter.begin()
            self.run()
            found = meter.peak - before
        self.times.clear()
        return found

    def _wait(self) -> None:
        if self._asked.device == "cuda":
            torch.cuda.synchronize()


def compare(words: int, settings: list[LossChunks], asked: argparse.Namespace) -> list[str]:
    """The table's lines of one vocabulary."""
    torch.manual_seed(0)
    task = Task(
        "write",
        Writer(words, asked.width).to(asked.device),
        asked.samples,
        Samples(words, asked.width, asked.tokens),
    )
    graph = analyse(Workload(name="heads", tasks=[task], operators=(Body,))).tasks["write"]
    op = graph.ops[-1]
    hidden = torch.randn(asked.samples, asked.tokens, asked.width, device=asked.device, requires_grad=True)
    labels = torch.randint(words, (asked.samples, asked.tokens), device=asked.device)
    inputs = tuple(hidden if name == "hidden" else labels for name in (*op.fields, *op.inputs))
    ways = [Way(timed_op(graph, op, asked.samples, setting), inputs, asked) for setting in settings]
    for way in ways:
        way.run()  # gradients are there from now on
    peaks = [way.peak() for way in ways]
    for _ in range(asked.rounds):
        for way in ways:
            way.run()
    times = [median(way.times) for way in ways]
    return [
        f"| {words:,} | {way.loss_chunks} | {peak / MIB:,.0f} | {peak / peaks[0]:.2f} "
        f"| {seconds * 1e3:,.1f} | {seconds / times[0]:.2f} |"
        for way, peak, seconds in zip(ways, peaks, times, strict=True)
    ]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--words", type=int, nargs="+", default=(32_000, 64_000, 128_000), metavar="V")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    number: Callable[[str], LossChunks] = lambda text: "auto" if text == "auto" else int(text)  # noqa: E731
    parser.add_argument("--chunks", type=number, nargs="+", default=["auto"], metavar="auto|K")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    asked = parser.parse_args()
    print("| words | chunks | peak, MiB | / one go | time, ms | / one go |")
    print("|---|---|---|---|---|---|")
    for words in asked.words:
        print("\n".join(compare(words, [1, *asked.chunks], asked)), flush=True)


if __name__ == "__main__":
    main()
