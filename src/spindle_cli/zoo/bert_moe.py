"""BERT with a mixture of experts in every second layer, trained to fill in masked words.

As large as HAP's (EuroSys 2024) BERT-MoE: BERT-Base, of which six layers have experts instead of an MLP; and
as small as a test. Shapes: B samples, S tokens, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.experts import MixtureOfExperts, capacity_of
from spindle_cli.zoo.layers import Attention, EncoderLayer
from spindle_cli.zoo.options import Size, choose_spec
from spindle_cli.zoo.synthetic import FloatField, SyntheticDataset, TokenField

# Of the mean of the gates' balance in the loss, as in GShard.
_BALANCE_WEIGHT = 0.01
# What stands for a masked word, and the label of one that is not to be found.
_MASK, _NO_LABEL = 0, -100
# What a normally distributed number is below in 15 % of all cases.
_MASKED_BELOW = -1.0364


@dataclass(frozen=True)
class BertMoeSpec:
    """A model. `pairs`: of a layer with an MLP and one with experts. `factor`: places of an expert over its
    even part.
    """

    width: int
    pairs: int
    heads: int
    hidden: int
    experts: int
    factor: float
    vocabulary: int
    tokens: int
    batch_size: int


# HAP's case: 12 layers of width 768, two experts for each of 8 devices, 128 tokens, a capacity factor of 1.25
# for both choices together.
MODELS: dict[Size, BertMoeSpec] = {
    "paper": BertMoeSpec(768, 6, 12, 3072, 16, 1.25, 30522, 128, 256),
    "laptop": BertMoeSpec(32, 2, 4, 64, 4, 1.25, 128, 16, 16),
}


class ExpertLayer(nn.Module):
    """Pre-norm transformer layer with a mixture of experts in place of the MLP."""

    def __init__(self, spec: BertMoeSpec) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(spec.width)
        self.attention = Attention(spec.width, spec.heads)
        self.experts_norm = nn.LayerNorm(spec.width)
        capacity = capacity_of(spec.tokens, spec.experts, spec.factor)
        self.mixture = MixtureOfExperts(spec.width, spec.hidden, spec.experts, capacity)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, W] -> [B, S, W], and how unbalanced each sample's routing is [B]."""
        x = x + self.attention(self.attention_norm(x))
        mixed, balance = self.mixture(self.experts_norm(x))
        return x + mixed, balance


class LayerPair(nn.Module):
    """A layer with an MLP, then one with experts: one operator, so that all ops of a chain are equal."""

    def __init__(self, spec: BertMoeSpec) -> None:
        super().__init__()
        self.plain = EncoderLayer(spec.width, spec.heads, hidden=spec.hidden)
        self.sparse = ExpertLayer(spec)

    def forward(self, x: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, W] and the balance of the pairs before [B] -> the same, with this one's added."""
        x, pair_balance = self.sparse(self.plain(x))
        return x, balance + pair_balance


class WordLoss(nn.Module):
    """BERT's head: a map, a norm and a projection onto words; mean cross entropy of the masked ones."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.words = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """[B, S, W] and word numbers [B, S], -100 where nothing was masked -> scalar."""
        logits = self.words(self.norm(functional.gelu(self.map(x))))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class BertMoe(nn.Module):
    """Finds the masked words of a text."""

    def __init__(self, spec: BertMoeSpec) -> None:
        super().__init__()
        self.words = nn.Embedding(spec.vocabulary, spec.width)
        self.positions = nn.Parameter(torch.randn(spec.tokens, spec.width) * 0.02)
        self.pairs = nn.ModuleList(LayerPair(spec) for _ in range(spec.pairs))
        self.loss = WordLoss(spec.width, spec.vocabulary)

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        """Word numbers [B, S], and those to be found [B, S] -> scalar loss."""
        x = self.words(text) + self.positions
        balance = x.new_zeros(x.shape[0])
        for pair in self.pairs:
            x, balance = pair(x, balance)
        loss: Tensor = self.loss(x, labels)
        total: Tensor = loss + _BALANCE_WEIGHT / len(self.pairs) * balance.mean()
        return total


class MaskedTexts(Dataset[dict[str, Tensor]]):
    """Random texts with about 15 % of their words masked; item i is always the same."""

    def __init__(self, tokens: int, vocabulary: int) -> None:
        self._drawn = SyntheticDataset(
            {"words": TokenField(tokens, vocabulary - 1), "noise": FloatField((tokens,))}
        )

    def __len__(self) -> int:
        return len(self._drawn)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = self._drawn[index]
        words, is_masked = drawn["words"] + 1, drawn["noise"] < _MASKED_BELOW
        return {
            "text": words.masked_fill(is_masked, _MASK),
            "labels": words.masked_fill(~is_masked, _NO_LABEL),
        }


def build(size: Size = "paper", batch_sizes: Mapping[str, int] | None = None) -> Workload:
    """One task, on synthetic data.

    Args:
        size: one of MODELS.
        batch_sizes: samples per iteration of the task; that of MODELS by default.

    Raises:
        WorkloadError: a size that there is not, or `batch_sizes` for an unknown task.
    """
    spec, batch_size = choose_spec("bert_moe", MODELS, size, "fill_in", batch_sizes)
    return Workload(
        name="bert-moe" if size == "paper" else f"bert-moe-{size}",
        tasks=[Task("fill_in", BertMoe(spec), batch_size, MaskedTexts(spec.tokens, spec.vocabulary))],
        operators=(LayerPair,),
        tp_plans={LayerPair: {"sparse.mixture.experts": "expertwise"}},
    )
