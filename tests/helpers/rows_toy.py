"""A small workload of two tasks with matrices whose gradients are mostly zeros, or of few tokens: an
embedding that both share, with a padding word; one of positions; wide dense layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import Dataset

from spindle_cli.workload.types import Task, Workload

WORDS, WIDTH, LENGTH, CLASSES, WIDE = 400, 8, 5, 4, 160
PADDING = 3


class Sentences(Dataset[dict[str, Tensor]]):
    """Random words, of which many are the same, and some padding."""

    def __init__(self, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.words = torch.randint(0, 30, (64, LENGTH), generator=drawn)
        self.label = torch.randint(0, CLASSES, (64,), generator=drawn)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"words": self.words[index], "label": self.label[index]}


class Embed(nn.Module):
    """Words and positions. `tied`: the words' embedding is used as a linear map, too."""

    def __init__(self, *, tied: bool, positions: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)
        self.positions = nn.Embedding(positions, WIDTH)
        self.tied = tied

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.words(words) + self.positions(torch.arange(LENGTH, device=words.device))
        if self.tied:
            found = found + 0.01 * functional.linear(found, self.words.weight).mean(-1, keepdim=True)
        return found


class Wide(nn.Module):
    """Two dense layers of a whole sentence each, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(LENGTH * WIDTH, WIDE)
        self.across = nn.Linear(WIDE, WIDE, bias=False)
        self.down = nn.Linear(WIDE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.gelu(self.up(x.flatten(1)))
        y = self.across(torch.tanh(self.across(y)))
        down: Tensor = self.down(y)
        return down


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classify = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(self.classify(x), label)


class Classify(nn.Module):
    def __init__(self, embed: Embed, wide: Wide) -> None:
        super().__init__()
        self.embed, self.wide, self.head = embed, wide, Head()

    def forward(self, words: Tensor, label: Tensor) -> Tensor:
        return self.head(self.wide(self.embed(words)), label)  # type: ignore[no-any-return]  # a module's


def build(
    tied: bool = False,
    frozen: bool = False,
    positions: int = LENGTH,
    embed_as: type[Embed] = Embed,
    wide_as: type[Wide] = Wide,
) -> Workload:
    """`tied`: the words are a linear map, too; `frozen`: they are not trained; `positions`: in the table."""
    embed, wide = embed_as(tied=tied, positions=positions), wide_as()
    embed.words.weight.requires_grad_(not frozen)
    return Workload(
        "rows",
        [
            Task("large", Classify(embed, wide), batch_size=12, dataset=Sentences(1)),
            Task("small", Classify(embed, wide), batch_size=4, dataset=Sentences(2), weight=0.5),
        ],
        operators=(embed_as, wide_as, Head),
    )
