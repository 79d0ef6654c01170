"""Write a toy checkpoint in shards, as a hub has them: make_base.py FOLDER."""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(7)
config = LlamaConfig(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    vocab_size=64,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1], max_shard_size="40KB")
