"""OFASys (arXiv 2212.04408): light adaptors per modality around a shared encoder-decoder that generates text.

Every task adapts its input to a sequence, encodes it after the instruction's tokens, and decodes the answer.
0.66 billion parameters at paper size. Shapes: B samples, S tokens, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.layers import TP_PLANS, DecoderLayer, EncoderLayer, TokenLoss
from spindle_cli.zoo.options import Size, check_option, choose_batch_sizes
from spindle_cli.zoo.synthetic import Field, FloatField, SyntheticDataset, TokenField


@dataclass(frozen=True)
class ModelSpec:
    """The shared encoder-decoder."""

    width: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    vocabulary: int
    instruction_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class AdaptorSpec:
    """How one modality becomes `tokens` vectors: projected, then through `layers` layers.

    `features`: numbers per token; None for text, which is embedded like all text.
    """

    tokens: int
    features: int | None
    layers: int

    def field(self, vocabulary: int) -> Field:
        """One sample."""
        if self.features is None:
            return TokenField(self.tokens, vocabulary)
        return FloatField((self.tokens, self.features))


MODELS: dict[Size, ModelSpec] = {
    "paper": ModelSpec(1024, 16, 19, 12, vocabulary=59457, instruction_tokens=32, answer_tokens=64),
    "laptop": ModelSpec(64, 4, 4, 3, vocabulary=512, instruction_tokens=8, answer_tokens=8),
}
# Inputs per token: image 16 x 16 pixels x 3; audio 80 mels x 4 frames; video 16 x 16 pixels x 3 x 2 frames;
# box 4 corners and a
# class; tables and documents are token numbers.
ADAPTORS: dict[Size, dict[str, AdaptorSpec]] = {
    "paper": {
        "image": AdaptorSpec(tokens=576, features=768, layers=2),
        "audio": AdaptorSpec(tokens=375, features=320, layers=2),
        "video": AdaptorSpec(tokens=784, features=1536, layers=2),
        "box": AdaptorSpec(tokens=64, features=5, layers=1),
        "table": AdaptorSpec(tokens=512, features=None, layers=1),
        "document": AdaptorSpec(tokens=512, features=None, layers=0),
    },
    "laptop": {
        "image": AdaptorSpec(tokens=36, features=48, layers=1),
        "audio": AdaptorSpec(tokens=24, features=32, layers=1),
        "video": AdaptorSpec(tokens=48, features=96, layers=1),
        "box": AdaptorSpec(tokens=8, features=5, layers=1),
        "table": AdaptorSpec(tokens=32, features=None, layers=1),
        "document": AdaptorSpec(tokens=32, features=None, layers=0),
    },
}

# Task -> its modality. The first 4 or 7 make the workload.
TASKS: dict[str, str] = {
    "image_captioning": "image",
    "speech_recognition": "audio",
    "summarisation": "document",
    "text_to_sql": "table",
    "visual_grounding": "image",
    "video_captioning": "video",
    "object_description": "box",
}
# At paper size fitted to published times of the DeepSpeed baseline: docs/benchmarks/calibration.md.
BATCH_SIZES: dict[Size, dict[str, int]] = {
    "paper": {
        "image_captioning": 480,
        "speech_recognition": 384,
        "summarisation": 480,
        "text_to_sql": 480,
        "visual_grounding": 384,
        "video_captioning": 480,
        "object_description": 480,
    },
    "laptop": {
        "image_captioning": 16,
        "speech_recognition": 16,
        "summarisation": 8,
        "text_to_sql": 8,
        "visual_grounding": 16,
        "video_captioning": 8,
        "object_description": 32,
    },
}


class Adaptor(nn.Module):
    """One modality's input to vectors of the shared width."""

    def __init__(self, spec: AdaptorSpec, model: ModelSpec, words: nn.Embedding) -> None:
        super().__init__()
        self.embed = words if spec.features is None else nn.Linear(spec.features, model.width)
        self.position = nn.Parameter(0.02 * torch.randn(spec.tokens, model.width))
        self.blocks = nn.ModuleList(EncoderLayer(model.width, model.heads) for _ in range(spec.layers))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, features], or token numbers [B, S] -> [B, S, W]."""
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x)
        out: Tensor = x
        return out


class EncoderDecoder(nn.Module):
    """The shared model: what all tasks have in common."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.words = nn.Embedding(spec.vocabulary, spec.width)
        self.instruction_position = nn.Parameter(0.02 * torch.randn(spec.instruction_tokens, spec.width))
        self.answer_position = nn.Parameter(0.02 * torch.randn(spec.answer_tokens, spec.width))
        self.encoder = nn.ModuleList(EncoderLayer(spec.width, spec.heads) for _ in range(spec.encoder_layers))
        self.encoder_norm = nn.LayerNorm(spec.width)
        self.decoder = nn.ModuleList(DecoderLayer(spec.width, spec.heads) for _ in range(spec.decoder_layers))

    def forward(self, instruction: Tensor, adapted: Tensor, answer: Tensor) -> Tensor:
        """Token numbers [B, S], vectors [B, T, W], token numbers so far [B, U] -> [B, U, W]."""
        context = torch.cat([self.words(instruction) + self.instruction_position, adapted], dim=1)
        for layer in self.encoder:
            context = layer(context)
        context = self.encoder_norm(context)
        x = self.words(answer) + self.answer_position
        for layer in self.decoder:
            x = layer(x, context)
        out: Tensor = x
        return out


class GenerationTask(nn.Module):
    """Answer an instruction about one modality's input."""

    def __init__(self, modality: str, adaptor: nn.Module, model: EncoderDecoder, loss: TokenLoss) -> None:
        super().__init__()
        self.modality = modality
        self.add_module(modality, adaptor)
        self.model = model
        self.loss = loss

    def forward(self, instruction: Tensor, content: Tensor, answer: Tensor) -> Tensor:
        """Token numbers [B, S], the modality's input, token numbers [B, U + 1] -> scalar."""
        adapted = self.get_submodule(self.modality)(content)
        decoded = self.model(instruction, adapted, answer[:, :-1])
        loss: Tensor = self.loss(decoded, answer[:, 1:])
        return loss


def build(tasks: int = 4, size: Size = "paper", batch_sizes: Mapping[str, int] | None = None) -> Workload:
    """Generation tasks over a shared encoder-decoder, on synthetic data.

    Args:
        tasks: 1 to 7; the paper has 4 and 7.
        size: the paper's, or small enough for a laptop.
        batch_sizes: samples per iteration of some or all tasks; BATCH_SIZES for the others.

    Raises:
        WorkloadError: a number of tasks or a size that there is not, or `batch_sizes` for an unknown task.
    """
    check_option("ofasys: size", size, tuple(MODELS))
    check_option("ofasys: tasks", tasks, range(1, len(TASKS) + 1))
    names = list(TASKS)[:tasks]
    sizes = choose_batch_sizes("ofasys", {name: BATCH_SIZES[size][name] for name in names}, batch_sizes)
    spec, adaptor_specs = MODELS[size], ADAPTORS[size]
    model, loss = EncoderDecoder(spec), TokenLoss(spec.width, spec.vocabulary)
    modalities = dict.fromkeys(TASKS[name] for name in names)
    adaptors = {name: Adaptor(adaptor_specs[name], spec, model.words) for name in modalities}
    return Workload(
        name=f"ofasys-{tasks}" if size == "paper" else f"ofasys-{tasks}-{size}",
        tasks=[
            Task(
                name=name,
                module=GenerationTask(TASKS[name], adaptors[TASKS[name]], model, loss),
                batch_size=sizes[name],
                dataset=make_dataset(spec, adaptor_specs[TASKS[name]]),
            )
            for name in names
        ],
        operators=(EncoderLayer, DecoderLayer, TokenLoss),
        tp_plans=TP_PLANS,
    )


def make_dataset(spec: ModelSpec, adaptor: AdaptorSpec) -> SyntheticDataset:
    """Instructions, one modality's inputs, and answers."""
    return SyntheticDataset(
        {
            "instruction": TokenField(spec.instruction_tokens, spec.vocabulary),
            "content": adaptor.field(spec.vocabulary),
            "answer": TokenField(spec.answer_tokens + 1, spec.vocabulary),
        }
    )
