"""Newer models of text, mixtures of experts and state-space models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Layer
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer
from transformers.models.mamba.modeling_mamba import MambaBlock
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.modernbert.modeling_modernbert import ModernBertEncoderLayer
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from hf_models.samples import CLASSES, IGNORED, LENGTH, WORDS, Family, label, padding, words

_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "use_cache": False,
    **_TOKENS,
}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}


class ClassOfText(nn.Module):
    """A loss of one's own on the logits of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids, attention_mask=attention_mask).logits
        return nn.functional.cross_entropy(logits, labels)


def _padded(generator: Generator) -> dict[str, Tensor]:
    return {"input_ids": words(generator), "attention_mask": padding(generator)}


def _next_words(generator: Generator) -> dict[str, Tensor]:
    fields = _padded(generator)
    return {**fields, "labels": fields["input_ids"].masked_fill(fields["attention_mask"] == 0, IGNORED)}


def _masked_words(generator: Generator) -> dict[str, Tensor]:
    fields = _padded(generator)
    chosen = (torch.rand(LENGTH, generator=generator) < 0.4) & (fields["attention_mask"] > 0)
    chosen[0] = True
    return {**fields, "labels": fields["input_ids"].masked_fill(~chosen, IGNORED)}


def _with_class(generator: Generator) -> dict[str, Tensor]:
    return {**_padded(generator), "labels": label(generator)}


def _batched(model: PreTrainedModel) -> PreTrainedModel:
    """With products of each token and its expert that have fixed shapes."""
    model.set_experts_implementation("batched_mm")
    return model


def qwen3() -> Family:
    """Qwen3ForCausalLM."""
    return Family(Qwen3ForCausalLM(Qwen3Config(**_DECODER)), (Qwen3DecoderLayer,), _next_words)


def gemma2() -> Family:
    """Gemma2ForCausalLM, every second layer of which sees four tokens before."""
    config = Gemma2Config(**_DECODER, sliding_window=4, query_pre_attn_scalar=4)
    return Family(Gemma2ForCausalLM(config), (Gemma2DecoderLayer,), _next_words)


def gemma3() -> Family:
    """Gemma3ForCausalLM, two of three layers of which see four tokens before."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**_DECODER, sliding_window=4, layer_types=kinds, query_pre_attn_scalar=4)
    return Family(Gemma3ForCausalLM(config), (Gemma3DecoderLayer,), _next_words)


def phi3() -> Family:
    """Phi3ForCausalLM."""
    return Family(Phi3ForCausalLM(Phi3Config(**_DECODER)), (Phi3DecoderLayer,), _next_words)


def modernbert() -> Family:
    """ModernBertForMaskedLM."""
    sizes = {
        name: value for name, value in _DECODER.items() if name not in ("head_dim", "num_key_value_heads")
    }
    config = ModernBertConfig(
        **sizes, local_attention=4, global_attn_every_n_layers=3, cls_token_id=1, sep_token_id=2
    )
    return Family(ModernBertForMaskedLM(config), (ModernBertEncoderLayer,), _masked_words)


def deberta_v2() -> Family:
    """DebertaV2ForSequenceClassification under a loss of one's own."""
    return Family(ClassOfText(DebertaV2ForSequenceClassification(_deberta())), (DebertaV2Layer,), _with_class)


def deberta_v2_own_loss() -> Family:
    """DebertaV2ForSequenceClassification with its own loss, which selects by the labels."""
    return Family(DebertaV2ForSequenceClassification(_deberta()), (DebertaV2Layer,), _with_class)


def _deberta() -> DebertaV2Config:
    return DebertaV2Config(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=32,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )


def mixtral() -> Family:
    """MixtralForCausalLM (experts)."""
    config = MixtralConfig(**_DECODER, num_local_experts=4, **_EXPERTS)
    return Family(_batched(MixtralForCausalLM(config)), (MixtralDecoderLayer,), _next_words)


def qwen3_moe() -> Family:
    """Qwen3MoeForCausalLM (experts)."""
    config = Qwen3MoeConfig(**_DECODER, num_experts=4, moe_intermediate_size=16, **_EXPERTS)
    return Family(_batched(Qwen3MoeForCausalLM(config)), (Qwen3MoeDecoderLayer,), _next_words)


def mixtral_balanced() -> Family:
    """MixtralForCausalLM with the loss that balances its experts."""
    config = MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    return Family(_batched(MixtralForCausalLM(config)), (MixtralDecoderLayer,), _next_words)


def mamba() -> Family:
    """MambaForCausalLM."""
    config = MambaConfig(
        vocab_size=WORDS, hidden_size=16, state_size=4, num_hidden_layers=3, use_cache=False, **_TOKENS
    )
    return Family(MambaForCausalLM(config), (MambaBlock,), _next_words)
