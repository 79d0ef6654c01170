"""A mixture of experts in plain PyTorch: top-2 gating with a fixed capacity, after GShard (Lepikhin et al.,
arXiv 2006.16668, section 2.2 and algorithm 1).

GShard routes the tokens of a *group* together, and an expert takes so many tokens of each group. Here a group
is one sample: which tokens an expert takes, and which are too many for it, does not depend on what else is in
the batch, so that a batch may be cut between any of its samples. GShard's second expert is taken at random
by its weight; here it always is. Shapes: B samples, S tokens, W width, E experts, C capacity, H hidden.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor, nn
from torch.nn import functional

# Experts that each token goes to.
_CHOSEN = 2


def capacity_of(tokens: int, experts: int, factor: float) -> int:
    """Tokens of a sample that one expert takes: `factor` times its even part of what all tokens ask for."""
    return ceil(_CHOSEN * tokens / experts * factor)


class Top2Gate(nn.Module):
    """Which two experts each token goes to, and with what weights."""

    def __init__(self, width: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.capacity = capacity
        self.logits = nn.Linear(width, experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, W] -> which token has which place of which expert [B, S, E, C], as 0 and 1; its weight
        there, the same shape; and how unbalanced each sample's routing is [B], 1 where it is even.

        Tokens take places in their order, first choices ahead of all second ones; behind the last place
        there is none, and that choice of the token is dropped.
        """
        chances = self.logits(x).softmax(-1)  # [B, S, E]
        first = _one_of(chances.argmax(-1), self.num_experts).to(x.dtype)
        others = chances.masked_fill(first.bool(), 0.0)
        second = _one_of(others.argmax(-1), self.num_experts).to(x.dtype)
        of_first = (chances * first).sum(-1)  # [B, S]
        together = of_first + (chances * second).sum(-1)
        ahead = first.sum(1, keepdim=True)  # [B, 1, E]
        place_of_first = ((first.cumsum(1) - 1) * first).sum(-1)  # [B, S]
        place_of_second = ((second.cumsum(1) - 1 + ahead) * second).sum(-1)
        # [B, S, E, C]; behind the last place there is none, so that the choice is dropped.
        takes = first.unsqueeze(-1) * _one_of(place_of_first, self.capacity).unsqueeze(2)
        takes_too = second.unsqueeze(-1) * _one_of(place_of_second, self.capacity).unsqueeze(2)
        first_weight = (of_first / together)[..., None, None]  # [B, S, 1, 1]
        weights = takes * first_weight + takes_too * (1 - first_weight)
        # GShard's l_aux: of each expert, the part of tokens that have it first times its mean chance.
        balance = self.num_experts * (first.mean(1) * chances.mean(1)).sum(-1)
        return takes + takes_too, weights, balance


def _one_of(numbers: Tensor, count: int) -> Tensor:
    """[...] -> [..., count], true at the number, if it is below `count`; no value is read on the way."""
    return numbers.unsqueeze(-1) == torch.arange(count, device=numbers.device)


class Experts(nn.Module):
    """E MLPs of `hidden` units, whose parameters are stacked along their first dimension.

    `forward` takes as many experts as its parameters have: a device that has some of them computes those.
    """

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_bias = nn.Parameter(torch.zeros(experts, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        self.down_bias = nn.Parameter(torch.zeros(experts, width))
        for weight in (self.up, self.down):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """What each expert takes [B, E, C, W] -> what it gives, the same shape."""
        inner = torch.einsum("becw,ewh->bech", x, self.up) + self.up_bias.unsqueeze(1)
        return torch.einsum("bech,ehw->becw", functional.gelu(inner), self.down) + self.down_bias.unsqueeze(1)


class MixtureOfExperts(nn.Module):
    """Each token through two of E experts."""

    def __init__(self, width: int, hidden: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.gate = Top2Gate(width, experts, capacity)
        self.experts = Experts(experts, width, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, W] -> [B, S, W], 0 for tokens that no expert has taken; and the gate's balance [B]."""
        takes, weights, balance = self.gate(x)
        given = torch.einsum("bsec,bsw->becw", takes, x)
        out = torch.einsum("bsec,becw->bsw", weights, self.experts(given))
        return out, balance
