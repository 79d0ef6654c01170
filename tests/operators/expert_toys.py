"""Layers with experts that are written in other ways than the zoo's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.experts import Experts, Top2Gate

BATCH, TOKENS, WIDTH, EXPERTS, DEPTH = 5, 6, 8, 4, 2


class Texts(Dataset[dict[str, Tensor]]):
    def __init__(self, tokens: int = TOKENS) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"words": torch.randint(12, (self._tokens,), generator=torch.Generator().manual_seed(index))}


class Mixture(nn.Module):
    """Takes a bias that is no sample's, and is trained; gives one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = Top2Gate(WIDTH, EXPERTS, 3)
        self.experts = Experts(EXPERTS, WIDTH, 2 * WIDTH)
        nn.init.normal_(self.experts.up_bias)
        nn.init.normal_(self.experts.down_bias)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        """[B, S, W] and [S, W] -> [B, S, W]."""
        normed = self.norm(x + shift)
        takes, weights, _ = self.gate(normed)
        given = self.experts(torch.einsum("bsec,bsw->becw", takes, normed))
        return x + torch.einsum("bsec,becw->bsw", weights, given)


class Model(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(12, WIDTH)
        self.shift = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x, torch.tanh(self.shift))
        logits = self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1), words.flatten())


def workload_of(layers: Sequence[nn.Module], plan: dict[str, str] | None = None) -> Workload:
    """One task over layers of one class."""
    kind = type(layers[0])
    return Workload(
        name="toy",
        tasks=[Task("task", Model(layers), BATCH, Texts())],
        operators=(kind,),
        tp_plans={kind: plan or {"experts": "expertwise"}},
    )


def mixtures() -> Workload:
    """A chain of two."""
    torch.manual_seed(0)
    return workload_of([Mixture() for _ in range(DEPTH)])
