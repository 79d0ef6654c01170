"""Models of transformers and PEFT to export, at toy size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from spindle_cli.workload.types import Task, Workload


def llama(*, tied: bool) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=12,
            vocab_size=16,
            max_position_embeddings=8,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )


class Chat(nn.Module):
    """A model that is a part of a task's module, beside something that no operator uses."""

    def __init__(self, llm: nn.Module) -> None:
        super().__init__()
        self.llm = llm
        self.spare = nn.Parameter(torch.randn(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.llm(input_ids=input_ids, labels=labels)


def items() -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(3)
    tokens = torch.randint(16, (8, 6), generator=drawn)
    return [{"input_ids": each, "labels": each} for each in tokens]


def build(tied: bool = True) -> Workload:
    return Workload("llama", [Task("chat", Chat(llama(tied=tied)), 2, items())], (LlamaDecoderLayer,))


def build_lora(kept: bool = False, **changes: Any) -> Workload:
    """`kept`: the head is trained whole, in the place of the base's. `changes`: of the adapters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["lm_head"] if kept else None,
        task_type="CAUSAL_LM",
        **changes,
    )
    model = get_peft_model(llama(tied=False), config)
    return Workload("lora", [Task("chat", model, 2, items())], (LlamaDecoderLayer,))
