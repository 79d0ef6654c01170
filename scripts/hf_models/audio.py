"""Models of sound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor
from transformers import (
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    WhisperConfig,
    WhisperForAudioClassification,
    WhisperForConditionalGeneration,
)
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2EncoderLayer
from transformers.models.whisper.modeling_whisper import WhisperDecoderLayer, WhisperEncoderLayer

from hf_models.samples import CLASSES, IGNORED, LENGTH, WORDS, Family, label, padding, words

WAVE = 320
_MELS, _FRAMES = 8, 20
_WHISPER: dict[str, Any] = {
    "vocab_size": WORDS,
    "num_mel_bins": _MELS,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_model": 16,
    "max_source_positions": _FRAMES // 2,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
    "num_labels": CLASSES,
    "classifier_proj_size": 8,
}


def wave(generator: Generator) -> dict[str, Tensor]:
    """A sound and its class."""
    return {"input_values": torch.randn(WAVE, generator=generator), "labels": label(generator)}


def _padded_wave(generator: Generator) -> dict[str, Tensor]:
    return {**wave(generator), "attention_mask": padding(generator, WAVE)}


def _spectrum(generator: Generator) -> Tensor:
    return torch.randn(_MELS, _FRAMES, generator=generator)


def _heard(generator: Generator) -> dict[str, Tensor]:
    return {"input_features": _spectrum(generator), "labels": label(generator)}


def _said(generator: Generator) -> dict[str, Tensor]:
    spoken = words(generator).masked_fill(padding(generator) == 0, IGNORED)
    assert len(spoken) == LENGTH
    return {"input_features": _spectrum(generator), "labels": spoken}


def sound_config(kind: Any = Wav2Vec2Config, **more: Any) -> Any:
    """Of a Wav2Vec2, or of its like."""
    return kind(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=32,
        conv_dim=(8, 8, 8),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 2),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        num_labels=CLASSES,
        hidden_dropout=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        mask_time_prob=0.0,
        **more,
    )


def wav2vec2() -> Family:
    """Wav2Vec2ForSequenceClassification."""
    model = Wav2Vec2ForSequenceClassification(sound_config())
    return Family(model, (Wav2Vec2EncoderLayer,), wave)


def wav2vec2_padded() -> Family:
    """Wav2Vec2ForSequenceClassification on sounds of several lengths."""
    model = Wav2Vec2ForSequenceClassification(sound_config())
    return Family(model, (Wav2Vec2EncoderLayer,), _padded_wave)


def whisper_classification() -> Family:
    """WhisperForAudioClassification."""
    model = WhisperForAudioClassification(WhisperConfig(**_WHISPER))
    return Family(model, (WhisperEncoderLayer,), _heard)


def whisper() -> Family:
    """WhisperForConditionalGeneration."""
    model = WhisperForConditionalGeneration(WhisperConfig(**_WHISPER))
    return Family(model, (WhisperEncoderLayer, WhisperDecoderLayer), _said)
