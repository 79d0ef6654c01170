"""A text encoder of BERT-Base's size (Devlin et al., arXiv 1810.04805) with a loss over each token.

Shapes: B samples, S tokens, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.layers import TP_PLANS, EncoderLayer, TokenLoss
from spindle_cli.zoo.options import Size, choose_spec
from spindle_cli.zoo.synthetic import SyntheticDataset, TokenField

TASK = "read"


@dataclass(frozen=True)
class BertSpec:
    """Sizes of the model, tokens of a sample, and how many samples an iteration has."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    tokens: int
    batch_size: int


# WikiText-2 has 33,278 different words; its vocabulary is brought to a multiple of 64.
MODELS: dict[Size, BertSpec] = {
    "paper": BertSpec(768, 12, 12, 33280, 128, 2048),
    "laptop": BertSpec(32, 3, 2, 256, 8, 16),
}


class Words(nn.Module):
    """Looks up tokens and adds their positions."""

    def __init__(self, spec: BertSpec) -> None:
        super().__init__()
        self.words = nn.Embedding(spec.vocabulary, spec.width)
        self.position = nn.Parameter(torch.zeros(1, spec.tokens, spec.width))

    def forward(self, text: Tensor) -> Tensor:
        """Token numbers [B, S] -> [B, S, W]."""
        out: Tensor = self.words(text) + self.position
        return out


class Bert(nn.Module):
    """Says the word at each place of a text of which some words are replaced."""

    def __init__(self, spec: BertSpec) -> None:
        super().__init__()
        self.words = Words(spec)
        self.layers = nn.ModuleList(EncoderLayer(spec.width, spec.heads) for _ in range(spec.layers))
        self.loss = TokenLoss(spec.width, spec.vocabulary)

    def forward(self, text: Tensor, original: Tensor) -> Tensor:
        """Token numbers [B, S] twice -> scalar loss."""
        x = self.words(text)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.loss(x, original)
        return loss


def build(size: Size = "paper", batch_sizes: Mapping[str, int] | None = None) -> Workload:
    """One task, on synthetic texts.

    Args:
        size: one of MODELS.
        batch_sizes: samples per iteration; those of MODELS by default.

    Raises:
        WorkloadError: a size that there is not, or `batch_sizes` for an unknown task.
    """
    spec, batch_size = choose_spec("bert", MODELS, size, TASK, batch_sizes)
    field = TokenField(spec.tokens, spec.vocabulary)
    return Workload(
        name="bert-base" if size == "paper" else "bert-laptop",
        tasks=[Task(TASK, Bert(spec), batch_size, SyntheticDataset({"text": field, "original": field}))],
        operators=(Words, EncoderLayer, TokenLoss),
        tp_plans=TP_PLANS,
    )
