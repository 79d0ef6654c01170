"""A Llama that is fine-tuned by LoRA beside a second task, from a checkpoint on disk.

* `chat`: the Llama of `base/`, which `save_pretrained` has written in shards; its own weights stay as they
  are, and adapters of its queries and values are trained.
* `topic`: a small encoder that is trained whole, from nothing.

`make_base.py` writes a toy for `base/`; a downloaded one works the same.
"""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from spindle_cli import Task, Workload

LENGTH, TOPICS = 16, 3


class Texts(Dataset[dict[str, Tensor]]):
    """Tokens drawn sample by sample, each from its number: put your own in their place."""

    def __init__(self, words: int, *, topics: bool, count: int = 64) -> None:
        self.words, self.topics, self.count = words, topics, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.words, (LENGTH,), generator=random)
        if self.topics:
            return {"input_ids": tokens, "labels": torch.randint(TOPICS, (), generator=random)}
        mask = (torch.arange(LENGTH) < LENGTH - index % 4).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def chat(base: str, rank: int, dropout: float) -> PeftModel:
    """A Llama of the base's configuration, with adapters; its values are `init_from`'s."""
    config = LlamaConfig.from_pretrained(Path(__file__).parent / base)
    config.use_cache = False
    adapted = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=dropout,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(LlamaForCausalLM(config), adapted)


def topic(words: int, width: int = 32) -> nn.Module:
    """A small classifier of texts."""
    return BertForSequenceClassification(
        BertConfig(
            hidden_size=width,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=2 * width,
            vocab_size=words,
            max_position_embeddings=LENGTH,
            num_labels=TOPICS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def build(base: str = "base", rank: int = 4, dropout: float = 0.0, batch_size: int = 8) -> Workload:
    """The workload; `base`: the checkpoint's folder, beside this file, for its configuration alone."""
    model = chat(base, rank, dropout)
    words = model.config.vocab_size
    return Workload(
        name="hf-finetune",
        tasks=[
            Task("chat", model, batch_size, Texts(words, topics=False)),
            Task("topic", topic(words), batch_size, Texts(words, topics=True)),
        ],
        operators=(LlamaDecoderLayer, BertLayer),
    )
