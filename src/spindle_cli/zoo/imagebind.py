"""ImageBind's encoders (arXiv 2305.05665): one transformer per modality, into one space of embeddings.

Shapes: B samples, S tokens, W width of the encoder, E = embedding width common to all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spindle_cli.zoo.layers import EncoderLayer
from spindle_cli.zoo.synthetic import Field, FloatField, TokenField


@dataclass(frozen=True)
class GridSpec:
    """An encoder of images, `channels` x `height` x `width_px`, cut into patches every `stride` pixels."""

    width: int
    layers: int
    heads: int
    channels: int
    height: int
    width_px: int
    patch: int
    stride: int

    @property
    def field(self) -> Field:
        """One sample."""
        return FloatField((self.channels, self.height, self.width_px))

    @property
    def patches(self) -> int:
        """Tokens without the class token."""
        return self._along(self.height) * self._along(self.width_px)

    def _along(self, pixels: int) -> int:
        return (pixels - self.patch) // self.stride + 1


@dataclass(frozen=True)
class TextSpec:
    """An encoder of `tokens` token numbers below `vocabulary`."""

    width: int
    layers: int
    heads: int
    tokens: int
    vocabulary: int

    @property
    def field(self) -> Field:
        """One sample."""
        return TokenField(self.tokens, self.vocabulary)


@dataclass(frozen=True)
class MotionSpec:
    """An encoder of `channels` motion-sensor signals of `samples` samples, `kernel` of them to a token."""

    width: int
    layers: int
    heads: int
    channels: int
    samples: int
    kernel: int

    @property
    def field(self) -> Field:
        """One sample."""
        return FloatField((self.channels, self.samples))


Spec = GridSpec | TextSpec | MotionSpec


class Encoder(nn.Module):
    """What the encoders share: layers, then the pooled token through a norm into the common space."""

    def __init__(self, spec: Spec, tokens: int, embedding: int, *, causal: bool = False) -> None:
        super().__init__()
        self.position = nn.Parameter(0.02 * torch.randn(tokens, spec.width))
        self.blocks = nn.ModuleList(
            EncoderLayer(spec.width, spec.heads, causal=causal) for _ in range(spec.layers)
        )
        self.norm = nn.LayerNorm(spec.width)
        self.project = nn.Linear(spec.width, embedding, bias=False)

    def encode(self, tokens: Tensor) -> Tensor:
        """Embedded tokens through all layers, [B, S, W] -> [B, S, W]."""
        x = tokens + self.position
        for block in self.blocks:
            x = block(x)
        return x

    def embedding(self, pooled: Tensor) -> Tensor:
        """[B, W] -> [B, E]."""
        projected: Tensor = self.project(self.norm(pooled))
        return projected


class ClassTokenEncoder(Encoder):
    """An encoder that reads its embedding from a class token before the others."""

    def __init__(self, spec: Spec, patches: int, embedding: int) -> None:
        super().__init__(spec, patches + 1, embedding)
        self.class_token = nn.Parameter(0.02 * torch.randn(spec.width))

    def encode_patches(self, patches: Tensor) -> Tensor:
        """[B, S - 1, W] -> [B, E]."""
        class_token = self.class_token.expand(patches.shape[0], 1, -1)
        return self.embedding(self.encode(torch.cat([class_token, patches], dim=1))[:, 0])


class GridEncoder(ClassTokenEncoder):
    """Vision, audio (a spectrogram), thermal and depth images."""

    def __init__(self, spec: GridSpec, embedding: int) -> None:
        super().__init__(spec, spec.patches, embedding)
        self.embed = nn.Conv2d(spec.channels, spec.width, spec.patch, stride=spec.stride, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        """[B, channels, height, width_px] -> [B, E]."""
        return self.encode_patches(self.embed(image).flatten(2).transpose(1, 2))


class MotionEncoder(ClassTokenEncoder):
    """Motion-sensor signals, cut into short pieces."""

    def __init__(self, spec: MotionSpec, embedding: int) -> None:
        super().__init__(spec, spec.samples // spec.kernel, embedding)
        self.kernel = spec.kernel
        self.embed = nn.Linear(spec.channels * spec.kernel, spec.width, bias=False)

    def forward(self, signal: Tensor) -> Tensor:
        """[B, channels, samples] -> [B, E]."""
        pieces = (
            torch.unflatten(signal, -1, (-1, self.kernel)).transpose(1, 2).flatten(2)
        )  # [B, S - 1, channels x kernel]
        return self.encode_patches(self.embed(pieces))


class TextEncoder(Encoder):
    """Causal text encoder, read at the token of the highest number (end of text), as CLIP does."""

    def __init__(self, spec: TextSpec, embedding: int) -> None:
        super().__init__(spec, spec.tokens, embedding, causal=True)
        self.embed = nn.Embedding(spec.vocabulary, spec.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] -> [B, E]."""
        x = self.encode(self.embed(tokens))
        end = tokens.argmax(dim=1).view(-1, 1, 1).expand(-1, 1, x.shape[2])
        return self.embedding(x.gather(1, end).squeeze(1))


def make_encoder(spec: Spec, embedding: int) -> Encoder:
    """The encoder that `spec` describes."""
    if isinstance(spec, GridSpec):
        return GridEncoder(spec, embedding)
    if isinstance(spec, TextSpec):
        return TextEncoder(spec, embedding)
    return MotionEncoder(spec, embedding)
