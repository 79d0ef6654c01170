"""Models whose operators hang together in different ways: towers, cross attention, tuples, repeated and
frozen layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Classifier, Items, Tower, TwoTowers

PAIRS = {"image": (4, 6), "words": (3, 5)}


class Contrast(nn.Module):
    """A contrastive loss as a class, to be listed as coupled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        logits = functional.normalize(left, dim=-1) @ functional.normalize(right, dim=-1).T * self.scale
        return functional.cross_entropy(logits, torch.arange(len(left)))


class Contrasted(nn.Module):
    def __init__(self, vision: Tower, text: Tower, *, scaled: bool = False) -> None:
        super().__init__()
        self.vision, self.text, self.loss, self.scaled = vision, text, Contrast(), scaled

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        left, right = self.vision(image), self.text(words)
        loss = self.loss(left, right)
        return loss * 0.3 + left.pow(2).mean() if self.scaled else loss


def coupled_class() -> Workload:
    vision, text = Tower(), Tower(5)
    tasks = [
        Task("plain", Contrasted(vision, text), 8, Items(**PAIRS)),
        Task("scaled", Contrasted(vision, text, scaled=True), 4, Items(**PAIRS), weight=2.0),
    ]
    return Workload("coupled", tasks, operators=(Block,), coupled=(Contrast,))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        x = x + self.own(x, x, x, attn_mask=mask, need_weights=False)[0]
        x = x + self.cross(x, memory, memory, need_weights=False)[0]
        return x + functional.gelu(self.linear(x))


class EncoderDecoder(nn.Module):
    """Cross attention to the encoder's output, a causal mask made in glue, an output head tied to the
    embedding.
    """

    def __init__(self, encoder: Tower) -> None:
        super().__init__()
        self.encoder = encoder
        self.table = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(3))

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        memory = self.encoder.embed(image)
        for block in self.encoder.blocks:
            memory = block(memory)
        mask = torch.full((5, 5), -1e9, dtype=memory.dtype).triu(1)
        x = self.table(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x, memory, mask)
        logits = x @ self.table.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def encoder_decoder() -> Workload:
    data = Items(image=(4, 6), tokens=((6,), 11))
    tower = Tower()
    tasks = [
        Task("caption", EncoderDecoder(tower), 6, data),
        Task("classify", Classifier(tower), 4, Items(image=(4, 6), label=((), 4))),
    ]
    return Workload("encoder_decoder", tasks, operators=(Block, DecoderLayer))


class TwoLosses(nn.Module):
    """a.mean() + b.mean(), and a penalty on a parameter."""

    def __init__(self, left: Tower, right: Tower) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, image: Tensor, words: Tensor) -> dict[str, Tensor]:
        a, b = self.left(image).pow(2), self.right(words).abs()
        return {"loss": a.mean() + 0.5 * b.mean() + 0.01 * self.left.head.weight.pow(2).sum(), "aux": a}


def two_losses() -> Workload:
    return Workload("losses", [Task("t", TwoLosses(Tower(), Tower(5)), 6, Items(**PAIRS))], (Block,))


def frozen() -> Workload:
    """A frozen encoder, and one of which only the last layers are trained."""
    vision, text = Tower(), Tower(5)
    for parameter in vision.parameters():
        parameter.requires_grad_(False)
    for parameter in [*text.embed.parameters(), *text.blocks[0].parameters()]:
        parameter.requires_grad_(False)
    return Workload("frozen", [Task("t", TwoTowers(vision, text), 4, Items(**PAIRS))], (Block,))


class Pair(nn.Module):
    """Returns two tensors and something that is none; used whole by the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, both: tuple[Tensor, Tensor], skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, gate = both
        return self.linear(x) * gate + (0 if skip is None else skip), torch.sigmoid(gate + x)


class Named(nn.Module):
    """Returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.linear(x), "squares": x.pow(2)}


class Tuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.pairs = nn.ModuleList(Pair() for _ in range(3))
        self.named = Named()

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image)
        both = (x, torch.sigmoid(x))
        for pair in self.pairs:
            both = pair(both, skip=x if pair is self.pairs[1] else None)
        last = self.named(both[0])
        return (last["out"] * both[1] + last["squares"]).mean()


def tuples() -> Workload:
    return Workload("tuples", [Task("t", Tuples(), 4, Items(image=(4, 6)))], operators=(Pair, Named))


class Halve(nn.Module):
    """No parameters: every second token is dropped."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2]


class Albert(nn.Module):
    """One layer used again and again, with parameter-free operators between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.layer = Block()
        self.halve = Halve()

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image)
        for _ in range(3):
            x = self.layer(x)
        x = self.halve(x)
        for _ in range(2):
            x = self.layer(x)
        return x.square().sum(-1).mean()


def albert() -> Workload:
    return Workload("albert", [Task("t", Albert(), 4, Items(image=(4, 6)))], operators=(Block, Halve))


class Residual(nn.Module):
    """The residual additions are glue between small operators."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.mixes = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in range(depth)
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image)
        for mix, mlp in zip(self.mixes, self.mlps, strict=True):
            x = x + mix(x.transpose(1, 2)).transpose(1, 2)
            x = x + mlp(x)
        return x.pow(2).mean()


def residual() -> Workload:
    return Workload(
        "residual", [Task("t", Residual(), 4, Items(image=(4, 6)))], operators=(nn.Linear, nn.Sequential)
    )
