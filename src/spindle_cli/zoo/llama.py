"""A Llama-like language model (arXiv 2302.13971) that two tasks train: long texts, and short instructions.

As large as Llama 2's largest, so that its parameters fit no device whole; of 300 million, which four
processes of one machine train; and as small as a test. Shapes: B samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.layers import TP_PLANS, LanguageLayer, TokenLoss
from spindle_cli.zoo.options import check_option, choose_batch_sizes
from spindle_cli.zoo.synthetic import SyntheticDataset, TokenField

LlamaSize = Literal["70b", "300m", "laptop"]


@dataclass(frozen=True)
class LlamaSpec:
    """A model, how many tokens a sample of each task has, and how many samples an iteration."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    tokens: Mapping[str, int]
    batch_sizes: Mapping[str, int]


# All heads have keys and values of their own, so the wide layer of the largest is narrower than Llama 2's for
# as many parameters.
MODELS: dict[LlamaSize, LlamaSpec] = {
    "70b": LlamaSpec(
        8192, 80, 64, 24576, 32000, {"write": 4096, "instruct": 1024}, {"write": 64, "instruct": 256}
    ),
    "300m": LlamaSpec(1024, 20, 16, 3072, 16000, {"write": 64, "instruct": 16}, {"write": 8, "instruct": 8}),
    "laptop": LlamaSpec(64, 4, 4, 192, 512, {"write": 24, "instruct": 8}, {"write": 8, "instruct": 16}),
}


class Llama(nn.Module):
    """Predicts each next token of a text."""

    def __init__(self, spec: LlamaSpec) -> None:
        super().__init__()
        self.words = nn.Embedding(spec.vocabulary, spec.width)
        self.blocks = nn.ModuleList(
            LanguageLayer(spec.width, spec.heads, spec.hidden) for _ in range(spec.layers)
        )
        self.loss = TokenLoss(spec.width, spec.vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        """Token numbers [B, T + 1] -> scalar loss."""
        x = self.words(text[:, :-1])
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.loss(x, text[:, 1:])
        return loss


class Texts(nn.Module):
    """Texts of one length."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, text: Tensor) -> Tensor:
        """Token numbers [B, T + 1] -> scalar."""
        loss: Tensor = self.model(text)
        return loss


def build(size: LlamaSize = "70b", batch_sizes: Mapping[str, int] | None = None) -> Workload:
    """Two tasks over one language model, on synthetic data.

    Args:
        size: one of MODELS.
        batch_sizes: samples per iteration of some or all tasks; those of MODELS for the others.

    Raises:
        WorkloadError: a size that there is not, or `batch_sizes` for an unknown task.
    """
    check_option("llama: size", size, tuple(MODELS))
    spec = MODELS[size]
    sizes = choose_batch_sizes("llama", spec.batch_sizes, batch_sizes)
    model = Llama(spec)
    return Workload(
        name=f"llama-{size}",
        tasks=[
            Task(
                name,
                Texts(model),
                sizes[name],
                SyntheticDataset({"text": TokenField(tokens + 1, spec.vocabulary)}),
            )
            for name, tokens in spec.tokens.items()
        ],
        operators=(LanguageLayer, TokenLoss),
        tp_plans=TP_PLANS,
    )
