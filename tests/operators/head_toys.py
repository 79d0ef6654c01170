"""Tasks whose last op ends in a wide value: small language models and their like."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, default_collate

from helpers.analysed import analysed
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Task, Workload

WORDS, WIDTH, TOKENS, BATCH = 41, 6, 7, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.map(x))


class Texts(Dataset[dict[str, Tensor]]):
    """Of some samples the first labels do not count, of every fourth none does."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        labels = torch.randint(WORDS, (TOKENS,), generator=drawn)
        labels[: (index % 4) * 3] = -100
        return {"tokens": torch.randint(WORDS, (TOKENS,), generator=drawn), "labels": labels}


class Writer(nn.Module):
    """Tokens to logits, by the embedding's own weight; `loss` of the logits and the labels."""

    def __init__(self, loss: Callable[[nn.Module, Tensor, Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.head.weight = self.embed.weight
        self.loss = loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self, self.norm(x), labels)


def causal(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """As Hugging Face's models have it: the labels are shifted, not the logits."""
    wanted = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return functional.cross_entropy(model.head(x).view(-1, WORDS), wanted.view(-1))


def smoothed(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x.flatten(0, 1))
    return functional.cross_entropy(logits, labels.flatten(), label_smoothing=0.1)


def squared(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """A mean over all elements of the wide value; other samples count by themselves."""
    return (model.head(x).tanh() - labels[..., None] / WORDS).square().mean()


def weighted(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """One weight for each sample, of all of its tokens."""
    each = functional.cross_entropy(model.head(x).transpose(1, 2), labels, reduction="none")
    weights = (labels > 0).sum(1)
    return (each.mean(1) * weights).sum() / weights.sum()


def rooted(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """A root of what a sample's tokens add up to: they are not apart, samples are."""
    each = functional.cross_entropy(model.head(x).transpose(1, 2), labels, reduction="none")
    return each.sum(1).add(1).sqrt().mean()


def running(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """A token's logits are those of all before it too."""
    logits = model.head(x).cumsum(1)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def counted_inside(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """A mean over labels that all count, as they come from an argmax."""
    wanted = (x[..., :3] * labels[..., None].clamp(min=1)).argmax(-1)
    return functional.cross_entropy(model.head(x).transpose(1, 2), wanted)


def twice(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """One weight by two names, by a module and as it is."""
    logits = model.head(x) + x.tanh() @ model.embed.weight.T
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shifted(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The logits are shifted: their positions are not cut."""
    return functional.cross_entropy(model.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def dropped(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.dropout(model.head(x), 0.5).flatten(0, 1), labels.flatten())


def turned(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Words are moved past two dimensions."""
    return functional.cross_entropy(model.head(x[:, None]).permute(0, 3, 1, 2), labels[:, None])


def last_alone(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """One position's logits are picked, of which no dimension is left."""
    return functional.cross_entropy(model.head(x)[:, -1], labels[:, -1])


def two_results(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x)
    entropy = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return entropy + 1e-3 * logits.logsumexp(-1).square().mean()


def task_of(loss: Callable[[nn.Module, Tensor, Tensor], Tensor], *, bias: bool = False) -> TaskGraph:
    """The task's graph."""
    torch.manual_seed(0)
    task = Task("write", Writer(loss, bias), BATCH, Texts())
    return analysed(Workload(name="heads", tasks=[task], operators=(Layer,))).tasks["write"]


def batch_of() -> dict[str, Tensor]:
    """The first samples."""
    return default_collate([Texts()[index] for index in range(BATCH)])
