"""Workloads in the many shapes that users' models have; each small, deterministic, in double precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from spindle_cli.workload.types import FlowTask, Task, Workload

from .toy import WIDTH, Block, Classifier, Items, Tower, TwoTowers, two_tasks

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
        mask = torch.full((5, 5), -1e9, dtype=torch.float64).triu(1)
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


class Summed(nn.Module):
    """A sum over the samples, over two towers of which one is coupled."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.contrast = Tower(), Tower(5), Contrast()

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        a, b = self.left(image), self.right(words)
        return functional.mse_loss(a, b, reduction="sum") + self.contrast(a * 2, b)


def summed() -> Workload:
    task = Task("t", Summed(), 4, Items(**PAIRS), weight=0.1, reduction="sum")
    mean = Task("pure", SquaredSum(), 6, Items(image=(4, 6)), reduction="sum")
    return Workload("summed", [task, mean], operators=(Block,), coupled=(Contrast,))


class SquaredSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, image: Tensor) -> Tensor:
        return self.tower(image).pow(2).sum()


class Biased(nn.Module):
    """T5-like: the first layer makes a bias that all layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.first = BiasMaker()
        self.rest = nn.ModuleList(BiasUser() for _ in range(3))

    def forward(self, image: Tensor) -> Tensor:
        x, bias = self.first(self.embed(image))
        for layer in self.rest:
            x = layer(x, bias)
        return x.pow(2).mean()


class BiasMaker(nn.Module):
    """The bias has no batch dimension, so the layer that makes it cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.bias * 2


class BiasUser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.linear(x + bias)


def biased() -> Workload:
    return Workload("biased", [Task("t", Biased(), 4, Items(image=(4, 6)))], operators=(BiasMaker, BiasUser))


class ConvBlock(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width_in, width, 3, padding=1)
        self.norm = nn.BatchNorm1d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Batch norm in operators and in glue; an in-place activation in glue; per-sample picking by index."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)
        self.blocks = nn.ModuleList([ConvBlock(4, 5), ConvBlock(5, 5)])
        self.tail = Block(6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, image: Tensor, position: Tensor) -> Tensor:
        x = self.act(self.stem(image))
        for block in self.blocks:
            x = block(x)
        x = self.tail(x)
        picked = x[torch.arange(x.shape[0]), position]
        return self.norm(picked).pow(4).mean()


def convnet() -> Workload:
    task = Task("t", ConvNet(), 4, Items(image=(4, 6), position=((), 5)))
    return Workload("convnet", [task], operators=(ConvBlock, Block))


class Masked(nn.Module):
    """A mean over the tokens that count: no mean over samples, so it cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, image: Tensor, mask: Tensor, label: Tensor) -> Tensor:
        x = self.tower.embed(image)
        for block in self.tower.blocks:
            x = block(x)
        losses = functional.cross_entropy(self.last(x).transpose(1, 2), label, reduction="none")
        return (losses * mask).sum() / mask.sum()


def masked() -> Workload:
    data = Items(image=(4, 6), mask=((4,), 2), label=((4,), 5))
    data.data["mask"][:, 0] = 1
    return Workload("masked", [Task("t", Masked(), 4, data)], operators=(Block,))


class SumOverSize(nn.Module):
    """A sum divided by the batch's size is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower(5)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        a, b = self.left(image), self.right(words)
        per_sample = (a - b).pow(2).sum(-1) / image.shape[0]
        return per_sample.sum() + sum([a.sum(), b.sum()]) / (image.size(0) * WIDTH)


def sum_over_size() -> Workload:
    return Workload("sizes", [Task("t", SumOverSize(), 4, Items(**PAIRS))], operators=(Block,))


class Doubling(nn.Module):
    """Two views of each sample as two rows each."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        views = torch.stack([image, image.flip(1)], 1).flatten(0, 1)
        left, right = self.tower(views).unflatten(0, (image.shape[0], 2)).unbind(1)
        return (left - right).pow(2).mean() + words.mean()


def doubling() -> Workload:
    return Workload("doubling", [Task("t", Doubling(), 4, Items(**PAIRS))], operators=(Block,))


class Fuse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.linear(torch.cat([left.mean(1), right.mean(1)], -1))


class FusedLoss(nn.Module):
    def forward(self, fused: Tensor, label: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(fused, label)}


def flows() -> Workload:
    """Two encoders as nn.Sequential chains into one fusion, by add_flow; a second task traces one of them."""
    vision = nn.Sequential(nn.Linear(6, WIDTH), Block(), Block())
    text = nn.Sequential(nn.Linear(5, WIDTH), nn.Sequential(Block(), Block()))
    fuse, loss = Fuse(), FusedLoss()
    task = FlowTask("fused", 4, Items(image=(4, 6), words=(3, 5), label=((), WIDTH)))
    task.add_flow("image", vision).add_flow("words", text)
    task.add_flow(vision, fuse, argument="left").add_flow(text, fuse, argument="right")
    task.add_flow(fuse, loss).add_flow("label", loss, argument="label")
    return Workload("flows", [task, Task("own", Chained(vision), 8, Items(image=(4, 6)))], operators=(Block,))


class Chained(nn.Module):
    def __init__(self, chain: nn.Sequential) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, image: Tensor) -> Tensor:
        return self.chain(image).pow(2).mean()


class Across(nn.Module):
    """Attends across the batch, because nobody said batch_first=True; negatives from the same batch;
    squeeze().
    """

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.ModuleList(
            nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=first) for first in (True, False)
        )
        self.tower = Tower()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = image
        for layer in self.attend:
            x = layer(x)
        x = self.tower(x)
        margin = (x * x.roll(1, 0)).sum(-1) - self.score(x).squeeze()
        return functional.softplus(margin).mean()


def across() -> Workload:
    task = Task("t", Across(), 4, Items(image=(4, 6)))
    return Workload("across", [task], operators=(nn.TransformerEncoderLayer, Block))


class NoOperators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, image: Tensor, unused: Tensor | None = None) -> Tensor:
        x = image if unused is None else unused
        return self.linear(x).mean()


def no_operators() -> Workload:
    return Workload("none", [Task("t", NoOperators(), 4, Items(image=(4, 6)))])


ALL: dict[str, Callable[[], Workload]] = {
    build.__name__: build
    for build in (
        two_tasks,
        coupled_class,
        encoder_decoder,
        two_losses,
        frozen,
        tuples,
        albert,
        residual,
        summed,
        biased,
        convnet,
        masked,
        sum_over_size,
        doubling,
        flows,
        across,
        no_operators,
    )
}


def build(name: str) -> Workload:
    """One of them, in double precision, always with the same values."""
    torch.manual_seed(0)
    workload = ALL[name]()
    for task in workload.tasks:
        modules = [task.module] if isinstance(task, Task) else [f.consumer for f in task.flows]
        for module in modules:
            module.double()
        for key, value in task.dataset.data.items():
            task.dataset.data[key] = value.double() if value.is_floating_point() else value
    return workload
