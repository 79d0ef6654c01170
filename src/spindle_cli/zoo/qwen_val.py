"""QWen-VAL: a language model that sees (Qwen-VL, arXiv 2308.12966) and hears (Qwen-Audio, arXiv 2311.07919).

Three tasks: vision-language, audio-language, and both at once. 9.25 billion parameters at paper size. Shapes:
B samples, S tokens, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.layers import TP_PLANS, EncoderLayer, LanguageLayer, TokenLoss
from spindle_cli.zoo.options import Size, check_option, choose_batch_sizes
from spindle_cli.zoo.synthetic import Field, FloatField, SyntheticDataset, TokenField


@dataclass(frozen=True)
class PerceptionSpec:
    """An encoder of `tokens` pieces of input with `features` numbers each.

    `merge` of its tokens become one of the language model's.
    """

    width: int
    layers: int
    heads: int
    hidden: int
    tokens: int
    features: int
    merge: int

    @property
    def field(self) -> FloatField:
        """One sample."""
        return FloatField((self.tokens, self.features))


@dataclass(frozen=True)
class LanguageSpec:
    """The language model, and how many tokens of text a sample has."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    text_tokens: int


@dataclass(frozen=True)
class ModelSpec:
    """The whole model."""

    vision: PerceptionSpec
    audio: PerceptionSpec
    language: LanguageSpec


MODELS: dict[Size, ModelSpec] = {
    # Vision: ViT-bigG of 448 x 448 pixels in patches of 14. Audio: Whisper large, 30 s in 1500 pieces of 20
    # ms, two of its 10 ms mel frames each. Language: 7 billion parameters.
    "paper": ModelSpec(
        vision=PerceptionSpec(1664, 48, 16, hidden=8192, tokens=1024, features=588, merge=4),
        audio=PerceptionSpec(1280, 32, 20, hidden=5120, tokens=1500, features=160, merge=4),
        language=LanguageSpec(4096, 32, 32, hidden=11008, vocabulary=32000, text_tokens=128),
    ),
    "laptop": ModelSpec(
        vision=PerceptionSpec(64, 6, 4, hidden=256, tokens=32, features=48, merge=4),
        audio=PerceptionSpec(48, 4, 4, hidden=192, tokens=48, features=16, merge=4),
        language=LanguageSpec(96, 4, 4, hidden=256, vocabulary=512, text_tokens=12),
    ),
}
# At paper size fitted to published times of the DeepSpeed baseline: docs/benchmarks/calibration.md.
BATCH_SIZES: dict[Size, dict[str, int]] = {
    "paper": {"vision_language": 48, "audio_language": 144, "vision_audio_language": 72},
    "laptop": {"vision_language": 16, "audio_language": 8, "vision_audio_language": 8},
}


class PerceptionEncoder(nn.Module):
    """Vision or audio to vectors of the language model's width."""

    def __init__(self, spec: PerceptionSpec, width: int) -> None:
        super().__init__()
        self.merge = spec.merge
        self.embed = nn.Linear(spec.features, spec.width)
        self.position = nn.Parameter(0.02 * torch.randn(spec.tokens, spec.width))
        self.blocks = nn.ModuleList(
            EncoderLayer(spec.width, spec.heads, hidden=spec.hidden) for _ in range(spec.layers)
        )
        self.norm = nn.LayerNorm(spec.width)
        self.project = nn.Linear(spec.merge * spec.width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, features] -> [B, S / merge, language width]."""
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x)
        merged = torch.unflatten(self.norm(x), 1, (-1, self.merge)).flatten(2)
        projected: Tensor = self.project(merged)
        return projected


class LanguageModel(nn.Module):
    """Reads what was perceived, then the text; predicts each next token of the text."""

    def __init__(self, spec: LanguageSpec) -> None:
        super().__init__()
        self.words = nn.Embedding(spec.vocabulary, spec.width)
        self.blocks = nn.ModuleList(
            LanguageLayer(spec.width, spec.heads, spec.hidden) for _ in range(spec.layers)
        )
        self.loss = TokenLoss(spec.width, spec.vocabulary)

    def forward(self, perceived: list[Tensor], text: Tensor) -> Tensor:
        """Vectors [B, S, W] of each sense, token numbers [B, T + 1] -> scalar loss."""
        x = torch.cat([*perceived, self.words(text[:, :-1])], dim=1)
        for block in self.blocks:
            x = block(x)
        text_tokens = text.shape[1] - 1
        loss: Tensor = self.loss(x[:, -text_tokens:], text[:, 1:])
        return loss


class VisionLanguage(nn.Module):
    """Text about an image."""

    def __init__(self, vision: PerceptionEncoder, language: LanguageModel) -> None:
        super().__init__()
        self.vision = vision
        self.language = language

    def forward(self, vision: Tensor, text: Tensor) -> Tensor:
        """[B, S, features], token numbers [B, T + 1] -> scalar."""
        loss: Tensor = self.language([self.vision(vision)], text)
        return loss


class AudioLanguage(nn.Module):
    """Text about a sound."""

    def __init__(self, audio: PerceptionEncoder, language: LanguageModel) -> None:
        super().__init__()
        self.audio = audio
        self.language = language

    def forward(self, audio: Tensor, text: Tensor) -> Tensor:
        """[B, S, features], token numbers [B, T + 1] -> scalar."""
        loss: Tensor = self.language([self.audio(audio)], text)
        return loss


class VisionAudioLanguage(nn.Module):
    """Text about an image and a sound together."""

    def __init__(self, vision: PerceptionEncoder, audio: PerceptionEncoder, language: LanguageModel) -> None:
        super().__init__()
        self.vision = vision
        self.audio = audio
        self.language = language

    def forward(self, vision: Tensor, audio: Tensor, text: Tensor) -> Tensor:
        """[B, S, features] of each, token numbers [B, T + 1] -> scalar."""
        loss: Tensor = self.language([self.vision(vision), self.audio(audio)], text)
        return loss


def build(size: Size = "paper", batch_sizes: Mapping[str, int] | None = None) -> Workload:
    """Three tasks over two senses and one language model, on synthetic data.

    Args:
        size: the paper's, or small enough for a laptop.
        batch_sizes: samples per iteration of some or all tasks; BATCH_SIZES for the others.

    Raises:
        WorkloadError: a size that there is not, or `batch_sizes` for an unknown task.
    """
    check_option("qwen_val: size", size, tuple(MODELS))
    sizes = choose_batch_sizes("qwen_val", BATCH_SIZES[size], batch_sizes)
    spec = MODELS[size]
    vision = PerceptionEncoder(spec.vision, spec.language.width)
    audio = PerceptionEncoder(spec.audio, spec.language.width)
    language = LanguageModel(spec.language)
    text = TokenField(spec.language.text_tokens + 1, spec.language.vocabulary)
    see, hear = {"vision": spec.vision.field}, {"audio": spec.audio.field}
    tasks: dict[str, tuple[nn.Module, dict[str, Field]]] = {
        "vision_language": (VisionLanguage(vision, language), {**see, "text": text}),
        "audio_language": (AudioLanguage(audio, language), {**hear, "text": text}),
        "vision_audio_language": (
            VisionAudioLanguage(vision, audio, language),
            {**see, **hear, "text": text},
        ),
    }
    return Workload(
        name="qwen-val" if size == "paper" else f"qwen-val-{size}",
        tasks=[
            Task(name, module, sizes[name], SyntheticDataset(fields))
            for name, (module, fields) in tasks.items()
        ],
        operators=(EncoderLayer, LanguageLayer, TokenLoss),
        # Only at paper size no single device has the memory for all parameters.
        tp_plans=TP_PLANS,
    )
