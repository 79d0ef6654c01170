"""Newer models of images and of sound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from transformers import (
    ClapConfig,
    ClapModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    HubertConfig,
    HubertForSequenceClassification,
    Siglip2Config,
    Siglip2Model,
    Wav2Vec2ForCTC,
)
from transformers.models.clap.modeling_clap import ClapAudioStage, ClapTextLayer
from transformers.models.dinov2.modeling_dinov2 import Dinov2Layer
from transformers.models.hubert.modeling_hubert import HubertEncoderLayer
from transformers.models.siglip2.modeling_siglip2 import Siglip2EncoderLayer
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2EncoderLayer

from hf_models.audio import sound_config, wave
from hf_models.samples import CLASSES, IGNORED, PATCH, WORDS, Family, image_label, padding, words
from hf_models.vision import PICTURES, TOWER, WithLoss

_SIDE = 4  # patches
_SPOKEN = 5  # words of a sound


def _patches_described(generator: Generator) -> dict[str, Tensor]:
    patches = torch.randn(_SIDE * _SIDE, 3 * PATCH * PATCH, generator=generator)
    return {
        "input_ids": words(generator),
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(_SIDE * _SIDE, dtype=torch.long),
        "spatial_shapes": torch.tensor([_SIDE, _SIDE]),
    }


def _said(generator: Generator) -> dict[str, Tensor]:
    spoken = words(generator, _SPOKEN).masked_fill(padding(generator, _SPOKEN) == 0, IGNORED)
    return {"input_values": wave(generator)["input_values"], "labels": spoken}


def _heard_described(generator: Generator) -> dict[str, Tensor]:
    return {
        "input_ids": words(generator).clamp(min=3),
        "attention_mask": padding(generator),
        "input_features": torch.randn(1, 64, 16, generator=generator),
        "is_longer": torch.zeros(1, dtype=torch.bool),
    }


def dinov2() -> Family:
    """Dinov2ForImageClassification."""
    config = Dinov2Config(**PICTURES, mlp_ratio=2, num_labels=CLASSES)
    return Family(Dinov2ForImageClassification(config), (Dinov2Layer,), image_label)


def siglip2() -> Family:
    """Siglip2Model with its contrastive loss, on patches of images of one size."""
    config = Siglip2Config(
        text_config={**TOWER, "vocab_size": WORDS, "max_position_embeddings": 32, "projection_size": 16},
        vision_config={**TOWER, "num_patches": _SIDE * _SIDE, "patch_size": PATCH},
    )
    return Family(WithLoss(Siglip2Model(config)), (Siglip2EncoderLayer,), _patches_described)


class SaidInOrder(nn.Module):
    """A CTC loss of one's own on the logits of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_values: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_values).logits
        frames = torch.full_like(labels[:, 0], logits.shape[1])
        spoken = (labels >= 0).sum(1)
        scores = logits.log_softmax(-1).transpose(0, 1)
        each = nn.functional.ctc_loss(
            scores, labels.clamp(min=0), frames, spoken, reduction="none", zero_infinity=True
        )
        return (each / spoken).mean()


def wav2vec2_ctc() -> Family:
    """Wav2Vec2ForCTC under a CTC loss of one's own."""
    return Family(SaidInOrder(Wav2Vec2ForCTC(_spoken_config())), (Wav2Vec2EncoderLayer,), _said)


def wav2vec2_ctc_own_loss() -> Family:
    """Wav2Vec2ForCTC with its own loss, which asks for the largest label."""
    return Family(Wav2Vec2ForCTC(_spoken_config()), (Wav2Vec2EncoderLayer,), _said)


def _spoken_config() -> Any:
    return sound_config(vocab_size=WORDS, ctc_loss_reduction="mean", pad_token_id=0, ctc_zero_infinity=True)


def hubert() -> Family:
    """HubertForSequenceClassification."""
    config = sound_config(HubertConfig)
    return Family(HubertForSequenceClassification(config), (HubertEncoderLayer,), wave)


def clap() -> Family:
    """ClapModel with its contrastive loss."""
    texts: dict[str, Any] = {**TOWER, "vocab_size": WORDS, "max_position_embeddings": 32, "pad_token_id": 0}
    sounds: dict[str, Any] = {
        "window_size": 2,
        "num_mel_bins": 16,
        "spec_size": 64,
        "patch_size": 4,
        "patch_stride": [4, 4],
        "patch_embeds_hidden_size": 8,
        "hidden_size": 32,
        "depths": [1, 1, 1],
        "num_attention_heads": [2, 2, 2],
        "num_classes": 3,
        "drop_path_rate": 0.0,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = ClapConfig(text_config={**texts, **still}, audio_config=sounds, projection_dim=8)
    return Family(WithLoss(ClapModel(config)), (ClapAudioStage, ClapTextLayer), _heard_described)
