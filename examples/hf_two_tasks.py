"""Two tasks over Hugging Face layers: a ViT that classifies pictures, and the same ViT in front of a Llama
that describes them.

Both models are built from small configurations, with nothing downloaded; `from_pretrained` works the same.
The layers of `transformers` are the operators. The ViT is called whole; of the Llama the parts are, as the
picture's patches come before its words: embedding, layers, norm.

    pip install 'spindle-cli[hf]'
    spindle profile examples/hf_two_tasks.py:build -o profile.json --nproc 2
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaModel, ViTConfig, ViTModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.vit.modeling_vit import ViTLayer

from spindle_cli import Task, Workload

IMAGE_SIZE, PATCH_SIZE = 16, 4
PATCHES = (IMAGE_SIZE // PATCH_SIZE) ** 2 + 1  # and the class token
COLOURS, QUARTERS = 3, 4
START, END = COLOURS + QUARTERS, COLOURS + QUARTERS + 1  # after the words of colours and quarters
WORDS = END + 1
CAPTION = 4  # start, colour, quarter, end
# How tensor parallelism splits a ViT's layer.
VIT_PLAN = {
    "attention.q_proj": "colwise",
    "attention.k_proj": "colwise",
    "attention.v_proj": "colwise",
    "attention.o_proj": "rowwise",
    "mlp.fc1": "colwise",
    "mlp.fc2": "rowwise",
}


class Squares(Dataset[dict[str, Tensor]]):
    """Noise with one quarter brightened in one colour, and a caption that says which: 'start colour quarter
    end'.
    """

    def __init__(self, count: int, *, captions: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(count, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator) * 0.1
        self.colours = torch.randint(0, COLOURS, (count,), generator=generator)
        self.quarters = torch.randint(0, QUARTERS, (count,), generator=generator)
        self.captions = captions
        half = IMAGE_SIZE // 2
        for image, colour, quarter in zip(self.images, self.colours, self.quarters, strict=True):
            top, left = half * (int(quarter) // 2), half * (int(quarter) % 2)
            image[colour, top : top + half, left : left + half] += 1.0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image, quarter = self.images[index], self.quarters[index]
        if not self.captions:
            return {"image": image, "label": quarter}
        words = torch.tensor([START, int(self.colours[index]), COLOURS + int(quarter), END])
        return {"image": image, "words": words}


class Classify(nn.Module):
    """Which quarter is bright, from the ViT's class token."""

    def __init__(self, vision: ViTModel) -> None:
        super().__init__()
        self.vision = vision
        self.head = nn.Linear(vision.config.hidden_size, QUARTERS)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.vision(image).last_hidden_state  # [batch, patches, width]
        logits = self.head(x[:, 0])
        return functional.cross_entropy(logits, label)


class Describe(nn.Module):
    """The caption's next word, from the picture's patches and the words so far."""

    def __init__(self, vision: ViTModel, language: LlamaModel) -> None:
        super().__init__()
        self.vision = vision
        self.language = language
        self.project = nn.Linear(vision.config.hidden_size, language.config.hidden_size)
        self.head = nn.Linear(language.config.hidden_size, WORDS)
        length = PATCHES + CAPTION - 1
        self.register_buffer("positions", torch.arange(length)[None], persistent=False)
        # a word sees the picture and the words before it: 0 where it may look, -inf where it may not
        self.register_buffer("mask", torch.full((1, 1, length, length), -torch.inf).triu(1), persistent=False)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        patches = self.project(self.vision(image).last_hidden_state)
        x = torch.cat([patches, self.language.embed_tokens(words[:, :-1])], 1)  # [batch, length, width]
        rotation = self.language.rotary_emb(x, self.positions)
        for layer in self.language.layers:
            x = layer(x, attention_mask=self.mask, position_embeddings=rotation)
        logits = self.head(self.language.norm(x)[:, PATCHES:])
        return functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def build(width: int = 32, depth: int = 3, samples: int = 256) -> Workload:
    """The workload; both tasks share one ViT."""
    vision = ViTModel(
        ViTConfig(
            image_size=IMAGE_SIZE,
            patch_size=PATCH_SIZE,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=2,
            intermediate_size=2 * width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        add_pooling_layer=False,
    )
    language = LlamaModel(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=2 * width,
            num_hidden_layers=depth,
            num_attention_heads=4,
            intermediate_size=4 * width,
        )
    )
    return Workload(
        name="hf_two_tasks",
        tasks=[
            Task("classify", Classify(vision), batch_size=16, dataset=Squares(samples, captions=False)),
            Task(
                "describe", Describe(vision, language), batch_size=8, dataset=Squares(samples, captions=True)
            ),
        ],
        operators=(ViTLayer, LlamaDecoderLayer),
        tp_plans={ViTLayer: VIT_PLAN},  # Llama's configuration brings a plan of its own
    )
