"""Models of text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.t5.modeling_t5 import T5Block

from hf_models.samples import CLASSES, IGNORED, LENGTH, WORDS, Family, label, padding, words

_SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
_BERT = {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}
_DECODER = {**_SIZES, "num_key_value_heads": 2, "use_cache": False}


class ClassOfFirstToken(nn.Module):
    """A loss of one's own on the model without a head."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert
        self.head = nn.Linear(bert.config.hidden_size, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        return nn.functional.cross_entropy(self.head(hidden[:, 0]), labels)


def _padded(generator: Generator) -> dict[str, Tensor]:
    return {"input_ids": words(generator), "attention_mask": padding(generator)}


def _with_class(generator: Generator) -> dict[str, Tensor]:
    return {**_padded(generator), "labels": label(generator)}


def _with_masked_words(generator: Generator) -> dict[str, Tensor]:
    """Labels of some of the words alone."""
    fields = _padded(generator)
    chosen = (torch.rand(LENGTH, generator=generator) < 0.4) & (fields["attention_mask"] > 0)
    chosen[0] = True
    return {**fields, "labels": fields["input_ids"].masked_fill(~chosen, IGNORED)}


def _with_next_sentence(generator: Generator) -> dict[str, Tensor]:
    follows = torch.randint(0, 2, (), generator=generator)
    return {**_with_masked_words(generator), "next_sentence_label": follows}


def _with_next_words(generator: Generator) -> dict[str, Tensor]:
    fields = _padded(generator)
    return {**fields, "labels": fields["input_ids"].masked_fill(fields["attention_mask"] == 0, IGNORED)}


def _unpadded(generator: Generator) -> dict[str, Tensor]:
    tokens = words(generator)
    return {"input_ids": tokens, "labels": tokens}


def _pairs(generator: Generator) -> dict[str, Tensor]:
    """Words, and others that are to be said for them, padded."""
    length = LENGTH - 2
    mask = padding(generator, length)
    answer = words(generator, length).masked_fill(mask == 0, IGNORED)
    return {**_padded(generator), "labels": answer}


def bert() -> Family:
    """BertModel under a loss of one's own."""
    return Family(ClassOfFirstToken(BertModel(BertConfig(**_BERT))), (BertLayer,), _with_class)


def bert_pretraining() -> Family:
    """BertForPreTraining: two losses."""
    return Family(BertForPreTraining(BertConfig(**_BERT)), (BertLayer,), _with_next_sentence)


def bert_classification() -> Family:
    """BertForSequenceClassification."""
    return Family(BertForSequenceClassification(BertConfig(**_BERT)), (BertLayer,), _with_class)


def bert_masked_lm() -> Family:
    """BertForMaskedLM."""
    return Family(BertForMaskedLM(BertConfig(**_BERT)), (BertLayer,), _with_masked_words)


def gpt2() -> Family:
    """GPT2LMHeadModel."""
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=32,
        n_embd=16,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return Family(GPT2LMHeadModel(config), (GPT2Block,), _with_next_words)


def llama() -> Family:
    """LlamaForCausalLM."""
    return Family(LlamaForCausalLM(LlamaConfig(**_DECODER)), (LlamaDecoderLayer,), _with_next_words)


def llama_unpadded() -> Family:
    """LlamaForCausalLM without an attention mask."""
    return Family(LlamaForCausalLM(LlamaConfig(**_DECODER)), (LlamaDecoderLayer,), _unpadded)


def qwen2() -> Family:
    """Qwen2ForCausalLM."""
    return Family(Qwen2ForCausalLM(Qwen2Config(**_DECODER)), (Qwen2DecoderLayer,), _with_next_words)


def mistral() -> Family:
    """MistralForCausalLM, whose tokens see four before them."""
    config = MistralConfig(**_DECODER, sliding_window=4)
    return Family(MistralForCausalLM(config), (MistralDecoderLayer,), _with_next_words)


def t5() -> Family:
    """T5ForConditionalGeneration."""
    config = T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return Family(T5ForConditionalGeneration(config), (T5Block,), _pairs)
