"""Two tasks that compare every sample with every other, over towers that they share: as CLIP does, in glue,
beside a mean over the labels that count, and as SigLIP does, in an operator; with a parameter in each
comparison.
"""

from __future__ import annotations

from typing import Any

import eval_toys
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload

WIDTH, CLASSES = 6, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Clip(nn.Module):
    def __init__(self, image: nn.Sequential, text: nn.Sequential) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, picture: Tensor, words: Tensor, label: Tensor | None = None) -> Tensor:
        image = functional.normalize(self.image(picture), dim=-1)
        text = functional.normalize(self.text(words), dim=-1)
        logits = self.scale.exp() * image @ text.T
        labels = torch.arange(len(logits), device=logits.device)
        ways = functional.cross_entropy(logits, labels), functional.cross_entropy(logits.t(), labels)
        loss = sum(ways) / 2
        if label is not None:
            loss = loss + functional.cross_entropy(self.head(text), label)
        return self.returned(loss, image)

    def returned(self, loss: Tensor, _: Tensor) -> Any:
        return loss


class Looked(Clip):
    """Gives what it compares as well."""

    def returned(self, loss: Tensor, image: Tensor) -> Any:
        return {"loss": loss, "features": image}


class Pairwise(nn.Module):
    """SigLIP's loss: of each pair by itself whether it belongs together."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        logits = self.scale.exp() * text @ image.T + self.bias
        signs = 2 * torch.eye(len(logits), dtype=logits.dtype) - torch.ones_like(logits)
        return -functional.logsigmoid(signs * logits).sum(-1).mean()


class Siglip(nn.Module):
    def __init__(self, image: nn.Sequential, text: nn.Sequential) -> None:
        super().__init__()
        self.image, self.text, self.loss = image, text, Pairwise()

    def forward(self, picture: Tensor, words: Tensor) -> Tensor:
        return self.loss(self.image(picture), self.text(words))


class Drawn(torch.utils.data.Dataset[dict[str, Tensor]]):
    """`labelled`: with a label for two samples of five."""

    def __init__(self, count: int, seed: int, *, labelled: bool = False) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.picture = torch.randn(count, WIDTH, generator=drawn)
        self.words = torch.randn(count, WIDTH, generator=drawn)
        label = torch.arange(count)
        self.label = torch.where(label % 5 < 2, label % CLASSES, -100) if labelled else None

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        fields = {"picture": self.picture[index], "words": self.words[index]}
        return fields if self.label is None else {**fields, "label": self.label[index]}


def build_evaluated(looked_at: bool = False) -> Workload:
    """The same, evaluated: on a last batch of which every share has samples, and on one of which two have
    none. `looked_at`: metrics are worked out of what the first one compares.
    """
    workload = build()
    clip, siglip = workload.tasks
    assert isinstance(clip, Task)
    if looked_at:
        clip.module.__class__ = Looked
        clip.metrics = {"features": eval_toys.features}
    clip.eval_dataset, siglip.eval_dataset = Drawn(17, 2, labelled=True), Drawn(17, 3)
    return workload


def build(labelled: bool = True) -> Workload:
    """`labelled`: what the first task compares has labels too, of which some are left out."""
    torch.manual_seed(0)
    image, text = (nn.Sequential(Block(), Block()) for _ in range(2))
    return Workload(
        "contrasts",
        [
            Task("clip", Clip(image, text), 6, Drawn(24, 0, labelled=labelled)),
            Task("siglip", Siglip(image, text), 12, Drawn(36, 1), weight=0.5),
        ],
        operators=(Block,),
        contrastive=(Pairwise,),
    )
