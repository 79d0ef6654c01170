"""Newer models of several modalities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.blip.modeling_blip import BlipEncoderLayer
from transformers.models.blip.modeling_blip_text import BlipTextLayer
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer
from transformers.models.internvl.modeling_internvl import InternVLVisionLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLDecoderLayer, Qwen2_5_VLVisionBlock
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer, Qwen3VLVisionBlock
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from hf_models.multimodal import END, GRID, LANGUAGE, PATCHES, PICTURE, START, patches_told, told
from hf_models.samples import IMAGE, LENGTH, PATCH, Family, image, padding, words
from hf_models.vision import PICTURES, TOWER

_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIGHT = {"image_token_id": PICTURE, "vision_start_token_id": START, "vision_end_token_id": END}


def _told_of(tokens: int, *, types: bool = False) -> Any:
    def sample(generator: Generator) -> dict[str, Tensor]:
        fields = {"pixel_values": image(generator), **told(generator, tokens)}
        if types:
            fields["token_type_ids"] = (fields["input_ids"] == PICTURE).long()
        return fields

    return sample


def _captioned(generator: Generator) -> dict[str, Tensor]:
    mask = padding(generator)
    tokens = words(generator).masked_fill(mask == 0, 0)
    return {
        "pixel_values": image(generator),
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


# Of the vision encoders of Qwen2.5-VL and Qwen3-VL.
_EYES: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 4,
    "patch_size": PATCH,
    "out_hidden_size": 16,
}


def qwen2_5_vl() -> Family:
    """Qwen2_5_VLForConditionalGeneration, whose images have windows."""
    config = Qwen2_5_VLConfig(
        text_config={**LANGUAGE, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]}},
        vision_config={
            **_EYES,
            "window_size": 2 * PATCH,
            "fullatt_block_indexes": [1],
        },
        **_SIGHT,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    return Family(model, (Qwen2_5_VLVisionBlock, Qwen2_5_VLDecoderLayer), patches_told)


def qwen3_vl() -> Family:
    """Qwen3VLForConditionalGeneration."""
    config = Qwen3VLConfig(
        text_config={
            **LANGUAGE,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            **_EYES,
            "num_position_embeddings": GRID * GRID,
            "deepstack_visual_indexes": [0, 1],
        },
        **_SIGHT,
    )
    return Family(
        Qwen3VLForConditionalGeneration(config), (Qwen3VLVisionBlock, Qwen3VLTextDecoderLayer), patches_told
    )


def paligemma() -> Family:
    """PaliGemmaForConditionalGeneration (SigLIP, Gemma)."""
    config = PaliGemmaConfig(
        vision_config={**PICTURES, "model_type": "siglip_vision_model", "projection_dim": 16},
        text_config={**LANGUAGE, "model_type": "gemma", "head_dim": 4, **_TOKENS},
        image_token_index=PICTURE,
        projection_dim=16,
    )
    model = PaliGemmaForConditionalGeneration(config)
    return Family(model, (SiglipEncoderLayer, GemmaDecoderLayer), _told_of(PATCHES, types=True))


def gemma3_vision() -> Family:
    """Gemma3ForConditionalGeneration (SigLIP, Gemma 3)."""
    config = Gemma3Config(
        vision_config={**PICTURES, "image_size": 16, "model_type": "siglip_vision_model"},
        text_config={**LANGUAGE, "head_dim": 4, "query_pre_attn_scalar": 4, **_TOKENS},
        image_token_index=PICTURE,
        mm_tokens_per_image=4,
    )

    def sample(generator: Generator) -> dict[str, Tensor]:
        fields = _told_of(4, types=True)(generator)
        return {**fields, "pixel_values": torch.randn(3, 16, 16, generator=generator)}

    return Family(Gemma3ForConditionalGeneration(config), (SiglipEncoderLayer, Gemma3DecoderLayer), sample)


def internvl() -> Family:
    """InternVLForConditionalGeneration (InternViT, Qwen2)."""
    config = InternVLConfig(
        vision_config={**TOWER, "image_size": [16, 16], "patch_size": [PATCH, PATCH]},
        text_config={**LANGUAGE, "model_type": "qwen2"},
        image_token_id=PICTURE,
        image_seq_length=4,
    )

    def sample(generator: Generator) -> dict[str, Tensor]:
        return {**_told_of(4)(generator), "pixel_values": torch.randn(3, 16, 16, generator=generator)}

    return Family(InternVLForConditionalGeneration(config), (InternVLVisionLayer, Qwen2DecoderLayer), sample)


def blip() -> Family:
    """BlipForConditionalGeneration."""
    texts: dict[str, Any] = {
        **TOWER,
        "vocab_size": 44,
        "encoder_hidden_size": 16,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "use_cache": False,
        **_TOKENS,
        "sep_token_id": 2,
    }
    config = BlipConfig(text_config=texts, vision_config={**PICTURES, "attention_dropout": 0.0})
    assert (IMAGE, LENGTH) == (12, 9)
    return Family(BlipForConditionalGeneration(config), (BlipEncoderLayer, BlipTextLayer), _captioned)
