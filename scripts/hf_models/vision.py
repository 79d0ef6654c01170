"""Models of images, and of images and text."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Generator, Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPForImageClassification,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    SiglipConfig,
    SiglipForImageClassification,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer
from transformers.models.vit.modeling_vit import ViTLayer

from hf_models.samples import CLASSES, IMAGE, LENGTH, PATCH, WORDS, Family, image, image_label, padding, words

TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}
PICTURES: dict[str, Any] = {**TOWER, "image_size": IMAGE, "patch_size": PATCH}
_TEXTS: dict[str, Any] = {**TOWER, "vocab_size": WORDS, "max_position_embeddings": 32}
_CLIP_TEXTS = {**_TEXTS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_PROJECTED = 8


class ClassOfPicture(nn.Module):
    """A loss of one's own on what a vision model gives of a picture."""

    def __init__(self, vision: nn.Module, output: str, width: int) -> None:
        super().__init__()
        self.vision = vision
        self.output = output
        self.head = nn.Linear(width, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        seen = getattr(self.vision(pixel_values), self.output)
        return nn.functional.cross_entropy(self.head(seen), labels)


class WithLoss(nn.Module):
    """A model that gives its loss only if it is told to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **fields: Tensor) -> Any:
        return self.model(**fields, return_loss=True)


def vit() -> Family:
    """ViTForImageClassification."""
    config = ViTConfig(
        **PICTURES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES
    )
    return Family(ViTForImageClassification(config), (ViTLayer,), image_label)


def clip() -> Family:
    """CLIPModel with its contrastive loss."""
    config = CLIPConfig(text_config=_CLIP_TEXTS, vision_config=PICTURES, projection_dim=_PROJECTED)
    return Family(WithLoss(CLIPModel(config)), (CLIPEncoderLayer,), partial(_described, end=2))


def clip_vision() -> Family:
    """CLIPVisionModelWithProjection under a loss of one's own."""
    model = CLIPVisionModelWithProjection(CLIPVisionConfig(**PICTURES, projection_dim=_PROJECTED))
    return Family(ClassOfPicture(model, "image_embeds", _PROJECTED), (CLIPEncoderLayer,), image_label)


def clip_classification() -> Family:
    """CLIPForImageClassification."""
    config = CLIPConfig(text_config=_CLIP_TEXTS, vision_config=PICTURES, num_labels=CLASSES)
    return Family(CLIPForImageClassification(config), (CLIPEncoderLayer,), image_label)


def siglip_vision() -> Family:
    """SiglipVisionModel under a loss of one's own."""
    model = SiglipVisionModel(SiglipVisionConfig(**PICTURES))
    return Family(ClassOfPicture(model, "pooler_output", 16), (SiglipEncoderLayer,), image_label)


def siglip_classification() -> Family:
    """SiglipForImageClassification."""
    config = SiglipConfig(text_config=_TEXTS, vision_config=PICTURES, num_labels=CLASSES)
    return Family(SiglipForImageClassification(config), (SiglipEncoderLayer,), image_label)


def _described(generator: Generator, end: int) -> dict[str, Tensor]:
    """A picture and words for it, which end with a token of their own."""
    mask = padding(generator)
    tokens = words(generator).masked_fill(mask == 0, 0)
    tokens[int(mask.sum()) - 1] = end
    assert len(tokens) == LENGTH
    return {"input_ids": tokens, "attention_mask": mask, "pixel_values": image(generator)}
