"""Three tasks of transformers' own classes, at toy size and at 7 billion parameters.

* `match`: CLIP's contrastive loss between pictures and their descriptions.
* `caption`: a BART says what is in the picture, from the patches that the same vision tower sees.
* `write`: a Llama goes on with text; labels of padding are -100.

The vision tower is CLIP's, shared by `match` and `caption`, and frozen: locked-image tuning. BART and Llama
tie their heads to their embeddings. All is made from configurations, with nothing downloaded;
`from_pretrained` works the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer
from transformers.models.clip.modeling_clip import CLIPEncoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from spindle_cli import Task, Workload

IGNORED = -100  # a label that no loss counts
PAD, START, END = 0, 1, 2
FIRST_WORD = 3


@dataclass(frozen=True)
class Sizes:
    """Widths and depths of the three models, and how long their texts are, in tokens."""

    image: int
    patch: int
    words: int
    vision: dict[str, int]
    text: dict[str, int]
    captioner: dict[str, int]
    writer: dict[str, int]
    description: int
    caption: int
    document: int


def _tower(width: int, depth: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


def _bart(width: int, depth: int, heads: int) -> dict[str, int]:
    halves = ("encoder", "decoder")
    return {
        "d_model": width,
        **{f"{half}_layers": depth for half in halves},
        **{f"{half}_attention_heads": heads for half in halves},
        **{f"{half}_ffn_dim": 4 * width for half in halves},
    }


SIZES: dict[str, Sizes] = {
    "toy": Sizes(
        image=16,
        patch=4,
        words=64,
        vision=_tower(32, 3, 4),
        text=_tower(32, 3, 4),
        captioner=_bart(32, 2, 4),
        writer={**_tower(48, 4, 4), "num_key_value_heads": 2},
        description=8,
        caption=8,
        document=24,
    ),
    # CLIP's towers as in ViT-L/14 at 336 pixels, BART's large, Llama's 7B.
    "7b": Sizes(
        image=336,
        patch=14,
        words=32_000,
        vision=_tower(1024, 24, 16),
        text=_tower(768, 12, 12),
        captioner=_bart(1024, 12, 16),
        writer={**_tower(4096, 32, 32), "intermediate_size": 11_008, "num_key_value_heads": 32},
        description=64,
        caption=64,
        document=2048,
    ),
}


class Match(nn.Module):
    """CLIP, asked for its loss."""

    def __init__(self, clip: CLIPModel) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.clip(
            input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask, return_loss=True
        )


class Caption(nn.Module):
    """BART reads the patches that CLIP's vision tower sees, and says what they show."""

    def __init__(self, clip: CLIPModel, captioner: BartForConditionalGeneration) -> None:
        super().__init__()
        self.vision = clip.vision_model
        self.project = nn.Linear(clip.config.vision_config.hidden_size, captioner.config.d_model)
        self.captioner = captioner

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        patches = self.project(self.vision(pixel_values).last_hidden_state)  # [batch, patches, width]
        return self.captioner(inputs_embeds=patches, labels=labels)


class Drawn(Dataset[dict[str, Tensor]]):
    """Pictures and texts drawn sample by sample, each from its number: put your own in their place."""

    def __init__(self, kind: Literal["match", "caption", "write"], sizes: Sizes, count: int = 256) -> None:
        self.kind, self.sizes, self.count = kind, sizes, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random, sizes = torch.Generator().manual_seed(index), self.sizes
        if self.kind == "write":
            tokens, mask = self._text(random, sizes.document)
            return {
                "input_ids": tokens,
                "attention_mask": mask,
                "labels": tokens.masked_fill(mask == 0, IGNORED),
            }
        picture = torch.randn(3, sizes.image, sizes.image, generator=random)
        if self.kind == "match":
            tokens, mask = self._text(random, sizes.description)
            return {"pixel_values": picture, "input_ids": tokens, "attention_mask": mask}
        tokens, mask = self._text(random, sizes.caption)
        return {"pixel_values": picture, "labels": tokens.masked_fill(mask == 0, IGNORED)}

    def _text(self, random: Generator, length: int) -> tuple[Tensor, Tensor]:
        """Tokens that end with END and are padded behind it, and which of them are no padding."""
        used = int(torch.randint(length // 2, length + 1, (), generator=random))
        mask = (torch.arange(length) < used).long()
        tokens = torch.randint(FIRST_WORD, self.sizes.words, (length,), generator=random)
        tokens[used - 1] = END
        return tokens.masked_fill(mask == 0, PAD), mask


def build(size: str = "toy", batch_size: int = 8) -> Workload:
    """The workload; `size`: "toy" or "7b"."""
    sizes = SIZES[size]
    special = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
    clip = CLIPModel(
        CLIPConfig(
            vision_config={**sizes.vision, "image_size": sizes.image, "patch_size": sizes.patch},
            text_config={
                **sizes.text,
                **special,
                "vocab_size": sizes.words,
                "max_position_embeddings": sizes.description,
            },
            projection_dim=sizes.text["hidden_size"],
        )
    )
    clip.vision_model.requires_grad_(False)
    captioner = BartForConditionalGeneration(
        BartConfig(
            **sizes.captioner,
            **special,
            vocab_size=sizes.words,
            max_position_embeddings=max(sizes.caption, (sizes.image // sizes.patch) ** 2 + 1),
            decoder_start_token_id=START,
            forced_eos_token_id=None,
            dropout=0.0,
            use_cache=False,
        )
    )
    writer = LlamaForCausalLM(
        LlamaConfig(
            **sizes.writer,
            **special,
            vocab_size=sizes.words,
            max_position_embeddings=sizes.document,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    return Workload(
        name=f"hf-multi-task-{size}",
        tasks=[
            Task("match", Match(clip), batch_size, Drawn("match", sizes)),
            Task("caption", Caption(clip, captioner), batch_size, Drawn("caption", sizes)),
            Task("write", writer, batch_size, Drawn("write", sizes)),
        ],
        operators=(CLIPEncoderLayer, BartEncoderLayer, BartDecoderLayer, LlamaDecoderLayer),
    )
