"""Padded batches beside all else that a plan may do: layers split by tensor parallelism, a head shared out by
words, a contrastive loss, a task in the explicit form; by index or as streams, with data to be evaluated on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from runtime_toys import WIDTH
from split_toys import PLAN, Layer
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from helpers.length_toys import WORDS, padded, texts
from spindle_cli.workload.types import FlowTask, Task, Workload


class Streamed(IterableDataset[dict[str, Tensor]]):
    """Items one after the other."""

    def __init__(self, items: list[dict[str, Tensor]]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.items)


class Words(nn.Module):
    """Words with their places. A size, and a tensor made of one, are written down by a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.embed(ids) + self.places(places) * (0.5 if ids.shape[1] > 5 else 1.5)


class Write(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, words: Words, blocks: nn.ModuleList, *, ragged: bool) -> None:
        """`ragged`: it gives something for every word, in place of one for a sample."""
        super().__init__()
        self.words, self.blocks, self.ragged = words, blocks, ragged

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits = x @ self.words.embed.weight.T
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "ends": logits if self.ragged else logits[:, -1]}


class Match(nn.Module):
    """Pictures and their texts, as CLIP compares them."""

    def __init__(self, words: Words, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.words, self.blocks = words, blocks
        self.picture = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids: Tensor, picture: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        there = (ids != 0)[..., None]
        text = functional.normalize((x * there).sum(1) / there.sum(1), dim=-1)
        image = functional.normalize(self.picture(picture), dim=-1)
        logits = self.scale.exp() * image @ text.T
        labels = torch.arange(len(logits), device=logits.device)
        ways = functional.cross_entropy(logits, labels), functional.cross_entropy(logits.t(), labels)
        return sum(ways) / 2


class Tail(nn.Module):
    """A loss as an operator of its own: a sum over what is not padding."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return ((x.square().mean(-1)) * (ids != 0)).sum()


def with_pictures(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"ids": padded(items)["ids"], "picture": torch.stack([item["picture"] for item in items])}


def ids_alone(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"ids": padded(items)["ids"]}


def ends(results: dict[str, Tensor]) -> float:
    return float(results["ends"].square().mean())


def build(
    tasks: list[str] | None = None, streams: bool = False, held_out: int | None = None, ragged: bool = False
) -> Workload:
    """`tasks`: those that are trained; all of them if None. `held_out`: samples to evaluate on."""
    torch.manual_seed(0)
    words, blocks = Words(), nn.ModuleList(Layer() for _ in range(2))
    drawn = torch.Generator().manual_seed(5)

    def pictured(seed: int) -> list[dict[str, Tensor]]:
        return [{**item, "picture": torch.randn(WIDTH, generator=drawn)} for item in texts(seed)]

    def data(items: list[dict[str, Tensor]]) -> Any:
        return Streamed(items) if streams else items

    chain = FlowTask("chain", 4, data(texts(4)), reduction="sum", collate=ids_alone)
    tail = Tail()
    chain.add_flow("ids", words).add_flow(words, blocks[0]).add_flow(blocks[0], blocks[1])
    chain.add_flow(blocks[1], tail).add_flow("ids", tail)
    every = [
        Task("write", Write(words, blocks, ragged=ragged), 4, data(texts(1)), collate=padded),
        Task("match", Match(words, blocks), 6, data(pictured(2)), 0.5, collate=with_pictures),
        chain,
    ]
    if held_out is not None:
        for task, items in zip(every, (texts(7), pictured(8), texts(9)), strict=True):
            task.eval_dataset = data(items[:held_out])
        every[0].metrics = {"ends": ends}
    chosen = [task for task in every if tasks is None or task.name in tasks]
    return Workload("mixed", chosen, operators=(Layer,), tp_plans={Layer: PLAN}, tp_vocabulary=WORDS)
