"""Tasks whose batches are padded to the longest of their samples, beside one of a fixed shape."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from spindle_cli.workload.types import Task, Workload

WIDTH, WORDS, BATCH = 6, 11, 4
# Two tasks' samples, of lengths that give batches of several lengths in any order.
LENGTHS = (3, 7, 2, 5, 9, 1, 4, 4, 2, 3, 1, 2, 8, 6, 3, 2)
IGNORED = -100


def texts(seed: int) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    items = []
    for length in LENGTHS:
        ids = torch.randint(1, WORDS, (length,), generator=drawn)
        labels = torch.where(torch.rand(length, generator=drawn) < 0.3, IGNORED, ids)
        labels[0] = ids[0]
        items.append({"ids": ids, "labels": labels})
    return items


def padded(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        "ids": pad_sequence([item["ids"] for item in items], batch_first=True),
        "labels": pad_sequence([item["labels"] for item in items], batch_first=True, padding_value=IGNORED),
    }


def with_targets(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = padded(items)
    return {"ids": batch["ids"], "target": batch["ids"].float()[..., None] / WORDS}


class Block(nn.Module):
    """Attention to what is not padding, and a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.map = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ x.transpose(1, 2) + mask
        return x + torch.tanh(self.map(scores.softmax(-1) @ x))


class Text(nn.Module):
    """Words with their places, blocks, and one number or a word for each."""

    def __init__(self, blocks: nn.ModuleList, *, means: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = blocks
        self.head = nn.Linear(WIDTH, 1 if means else WORDS)
        self.means = means

    def forward(self, ids: Tensor, labels: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        length = ids.shape[1]
        places = torch.arange(length, device=ids.device)
        x = self.words(ids) + self.places(places)
        # Numbers that a trace writes down: a size, a tensor made of one, what an `if` has decided by one.
        later = torch.triu(torch.full((int(length), int(length)), -1e4), diagonal=1)
        x = x * (0.5 if length > 5 else 1.5)
        for block in self.blocks:
            hidden = (ids == 0).to(x.dtype)[:, None, :] * -1e4
            x = block(x, hidden.expand(len(ids), int(length), length) + later.to(x.dtype))
        logits = self.head(x).view(len(ids) * length, -1)
        if target is not None:
            return (logits - target.view(-1, 1)).square().mean()
        return cross_entropy(logits, labels.view(-1))


class Plain(nn.Module):
    """Of fixed shape, with the blocks of the others."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return x.square().mean()


def build(tasks: list[str] | None = None) -> Workload:
    """`tasks`: those that are trained; all of them if None."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(2))
    drawn = torch.Generator().manual_seed(3)
    fixed = [{"x": torch.randn(3, WIDTH, generator=drawn)} for _ in range(8)]
    every = [
        Task("text", Text(blocks), BATCH, texts(1), collate=padded),
        Task("score", Text(blocks, means=True), BATCH, texts(2), collate=with_targets),
        Task("plain", Plain(blocks), BATCH, fixed),
    ]
    chosen = [task for task in every if tasks is None or task.name in tasks]
    return Workload("lengths", chosen, operators=(Block,))
