"""The model of `digits`: three shared encoders into one space of embeddings, and the tasks over them.

Shapes: B samples, S tokens, W width of the encoder, E = EMBEDDING.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from spindle_cli.zoo.digits.data import IMAGE_SHAPE, SPEECH_SHAPE, TEXT_BYTES
from spindle_cli.zoo.layers import ContrastiveLoss, EncoderLayer

EMBEDDING = 64
PATCH = 2  # pixels on a side
FRAMES_PER_TOKEN = 2
INITIAL_STD = (
    0.5  # of positions, about the size of the embedded input: a mean over tokens would hide weaker ones
)


class ImageEncoder(nn.Module):
    """Patches of the image through transformer layers."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        tokens = (IMAGE_SHAPE[0] // PATCH) * (IMAGE_SHAPE[1] // PATCH)
        self.embed = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.position = nn.Parameter(INITIAL_STD * torch.randn(tokens, width))
        self.blocks = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.head = EmbeddingHead(width)

    def forward(self, image: Tensor) -> Tensor:
        """[B, 8, 8] -> [B, E]."""
        x = self.embed(image.unsqueeze(1)).flatten(2).transpose(1, 2) + self.position  # [B, S, W]
        for block in self.blocks:
            x = block(x)
        embedding: Tensor = self.head(x.mean(dim=1))
        return embedding


class SpeechEncoder(nn.Module):
    """Pairs of log-mel frames through transformer layers."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        frames, mels = SPEECH_SHAPE
        self.embed = nn.Linear(FRAMES_PER_TOKEN * mels, width)
        self.position = nn.Parameter(INITIAL_STD * torch.randn(frames // FRAMES_PER_TOKEN, width))
        self.blocks = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.head = EmbeddingHead(width)

    def forward(self, speech: Tensor) -> Tensor:
        """[B, 40, 24] -> [B, E]."""
        frames = torch.unflatten(speech, 1, (-1, FRAMES_PER_TOKEN)).flatten(2)  # [B, S, frames x mels]
        x = self.embed(frames) + self.position
        for block in self.blocks:
            x = block(x)
        embedding: Tensor = self.head(x.mean(dim=1))
        return embedding


class TextEncoder(nn.Module):
    """Bytes through transformer layers; padding is seen by attention but left out of the mean."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(INITIAL_STD * torch.randn(TEXT_BYTES, width))
        self.blocks = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.head = EmbeddingHead(width)

    def forward(self, text: Tensor) -> Tensor:
        """Bytes [B, 24] -> [B, E]."""
        x = self.embed(text) + self.position  # [B, S, W]
        for block in self.blocks:
            x = block(x)
        written = (text != 0).unsqueeze(-1).to(x.dtype)
        embedding: Tensor = self.head((x * written).sum(dim=1) / written.sum(dim=1))
        return embedding


class EmbeddingHead(nn.Module):
    """From an encoder's pooled output to the common space."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, EMBEDDING, bias=False)

    def forward(self, pooled: Tensor) -> Tensor:
        """[B, W] -> [B, E]."""
        embedding: Tensor = self.project(self.norm(pooled))
        return embedding


class Classifier(nn.Module):
    """Which of the ten digits an embedding shows: its loss, and its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(EMBEDDING, 10)

    def forward(self, embedding: Tensor, label: Tensor) -> Tensor:
        """[B, E] and digits [B] -> mean cross-entropy."""
        return functional.cross_entropy(self.linear(embedding), label)

    def predict(self, embedding: Tensor) -> Tensor:
        """[B, E] -> digits [B]."""
        logits: Tensor = self.linear(embedding)
        return logits.argmax(dim=1)


class ImageText(nn.Module):
    """Images and names of the same digit belong together."""

    def __init__(self, image: ImageEncoder, text: TextEncoder) -> None:
        super().__init__()
        self.image = image
        self.text = text
        self.loss = ContrastiveLoss()

    def forward(self, image: Tensor, text: Tensor, label: Tensor) -> Tensor:
        """[B, 8, 8], [B, 24], [B] -> scalar."""
        loss: Tensor = self.loss(self.image(image), self.text(text), label)
        return loss


class SpeechText(nn.Module):
    """Speech and names of the same digit belong together, whatever the languages."""

    def __init__(self, speech: SpeechEncoder, text: TextEncoder) -> None:
        super().__init__()
        self.speech = speech
        self.text = text
        self.loss = ContrastiveLoss()

    def forward(self, speech: Tensor, text: Tensor, label: Tensor) -> Tensor:
        """[B, 40, 24], [B, 24], [B] -> scalar."""
        loss: Tensor = self.loss(self.speech(speech), self.text(text), label)
        return loss


class ImageSpeech(nn.Module):
    """Images and speech of the same digit belong together."""

    def __init__(self, image: ImageEncoder, speech: SpeechEncoder) -> None:
        super().__init__()
        self.image = image
        self.speech = speech
        self.loss = ContrastiveLoss()

    def forward(self, image: Tensor, speech: Tensor, label: Tensor) -> Tensor:
        """[B, 8, 8], [B, 40, 24], [B] -> scalar."""
        loss: Tensor = self.loss(self.image(image), self.speech(speech), label)
        return loss


class ImageClass(nn.Module):
    """Which digit an image shows."""

    def __init__(self, image: ImageEncoder) -> None:
        super().__init__()
        self.image = image
        self.classifier = Classifier()

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        """[B, 8, 8], [B] -> scalar."""
        loss: Tensor = self.classifier(self.image(image), label)
        return loss


class SpeechClass(nn.Module):
    """Which digit is spoken."""

    def __init__(self, speech: SpeechEncoder) -> None:
        super().__init__()
        self.speech = speech
        self.classifier = Classifier()

    def forward(self, speech: Tensor, label: Tensor) -> Tensor:
        """[B, 40, 24], [B] -> scalar."""
        loss: Tensor = self.classifier(self.speech(speech), label)
        return loss
