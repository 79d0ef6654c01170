"""A workload of more than nine billion parameters, far too large to allocate here."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload

from .toy import Items

WIDTH = 8192


class Layer(nn.Module):
    """Attention and a feed-forward part, as in a language model of this width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 128
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Encoder(nn.Module):
    def __init__(self, width_in: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(width_in, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Answer(nn.Module):
    def __init__(self, encoders: list[Encoder], language: nn.ModuleList, table: nn.Embedding) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)
        self.project = nn.ModuleList(nn.Linear(encoder.embed.out_features, WIDTH) for encoder in encoders)
        self.language = language
        self.table = table

    def forward(self, tokens: Tensor, **inputs: Tensor) -> Tensor:
        parts = [
            project(encoder(inputs[f"input{position}"]))
            for position, (encoder, project) in enumerate(zip(self.encoders, self.project, strict=True))
        ]
        x = torch.cat([*parts, self.table(tokens)], 1)
        for layer in self.language:
            x = layer(x)
        logits = x[:, -tokens.shape[1] : -1] @ self.table.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build() -> Workload:
    """Three tasks over a vision encoder, an audio encoder and a language model."""
    vision, audio = Encoder(588, 3328, 12), Encoder(128, 2560, 8)
    language = nn.ModuleList(Layer(WIDTH) for _ in range(8))
    table = nn.Embedding(152_000, WIDTH)
    tasks = []
    for name, encoders, widths in (
        ("vl", [vision], [588]),
        ("al", [audio], [128]),
        ("val", [vision, audio], [588, 128]),
    ):
        fields = {f"input{position}": (64, width) for position, width in enumerate(widths)}
        data = Items(8, tokens=((33,), 1000), **fields)
        tasks.append(Task(name, Answer(encoders, language, table), 8, data))
    return Workload("big", tasks, operators=(Layer,))
