"""Models of several modalities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLDecoderLayer, Qwen2VLVisionBlock

from hf_models.samples import IGNORED, IMAGE, PATCH, WORDS, Family, image, padding, words
from hf_models.vision import PICTURES

PICTURE, START, END = WORDS, WORDS + 1, WORDS + 2  # tokens after the words
LANGUAGE: dict[str, Any] = {
    "vocab_size": WORDS + 3,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "use_cache": False,
}
PATCHES = (IMAGE // PATCH) ** 2
GRID = 4  # patches of a side, four of which are one token


def told(generator: Generator, tokens: int) -> dict[str, Tensor]:
    """A picture's tokens, and words about it, of which labels are given."""
    told = words(generator)
    mask = padding(generator)
    shown = torch.full((tokens,), PICTURE)
    return {
        "input_ids": torch.cat([shown, told]),
        "attention_mask": torch.cat([torch.ones_like(shown), mask]),
        "labels": torch.cat([torch.full_like(shown, IGNORED), told.masked_fill(mask == 0, IGNORED)]),
    }


def _picture_told(generator: Generator) -> dict[str, Tensor]:
    return {"pixel_values": image(generator), **told(generator, PATCHES)}


def patches_told(generator: Generator) -> dict[str, Tensor]:
    """Patches of a picture of one size, and words about it."""
    patches = torch.randn(GRID * GRID, 3 * 2 * PATCH * PATCH, generator=generator)
    fields = told(generator, GRID * GRID // 4)
    return {
        **fields,
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([1, GRID, GRID]),
        "mm_token_type_ids": (fields["input_ids"] == PICTURE).int(),
    }


def llava() -> Family:
    """LlavaForConditionalGeneration (CLIP, Llama)."""
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**PICTURES),
        text_config=LlamaConfig(**LANGUAGE),
        image_token_index=PICTURE,
        image_seq_length=PATCHES,
    )
    return Family(LlavaForConditionalGeneration(config), (CLIPEncoderLayer, LlamaDecoderLayer), _picture_told)


def qwen2_vl() -> Family:
    """Qwen2VLForConditionalGeneration."""
    config = Qwen2VLConfig(
        text_config={**LANGUAGE, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]}},
        vision_config={"depth": 3, "embed_dim": 16, "hidden_size": 16, "num_heads": 4, "patch_size": PATCH},
        image_token_id=PICTURE,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return Family(
        Qwen2VLForConditionalGeneration(config), (Qwen2VLVisionBlock, Qwen2VLDecoderLayer), patches_told
    )
