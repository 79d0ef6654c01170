"""Whole models of transformers as they come: taken, and split as expected (scripts/hf_models)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'spindle-cli[hf]')")

from hf_families import FAMILIES, build

from helpers.analysed import analysed
from spindle_cli.training.batches import Batches

from .shares import gradients_of, run_cut, run_plain

# MetaOps and their numbers of operators; "whole": not split over the batch.
EXPECTED: dict[str, list[tuple[str, int] | tuple[str, int, str]]] = {
    "bert": [("bert", 3)],
    "bert_classification": [("bert", 3)],
    "bert_masked_lm": [("bert", 3)],
    "bert_pretraining": [("bert", 3)],
    "gpt2": [("transformer", 3)],
    "llama": [("model", 3)],
    "llama_unpadded": [("model", 3)],
    "qwen2": [("model", 3)],
    "mistral": [("model", 3)],
    "vit": [("vit", 3)],
    "clip": [("model.vision_model", 3), ("model.text_model", 3), ("loss", 1)],
    "clip_vision": [("vision", 3)],
    "clip_classification": [("vision_model", 3)],
    "siglip_vision": [("vision", 3)],
    "siglip_classification": [("vision_model", 3)],
    "wav2vec2": [("wav2vec2", 3)],
    "wav2vec2_padded": [("wav2vec2", 2), ("wav2vec2-2", 1)],
    "whisper_classification": [("encoder", 3)],
    "whisper": [("encoder", 3), ("decoder", 3)],
    # It takes what the last layer but one gives of the picture.
    "llava": [("vision_tower", 2), ("language_model", 3)],
    # The first layers make a position bias, which has no batch, and hand it on.
    "t5": [("encoder", 1), ("encoder-2", 2), ("decoder", 1), ("decoder-2", 2)],
    # Fields of one grid, and loops over the samples; windows put patches into another order and back.
    "qwen2_vl": [("visual", 2), ("visual-2", 1), ("language_model", 3)],
    "qwen2_5_vl": [("visual", 1), ("visual-2", 1), ("visual-3", 1), ("language_model", 3)],
    # Experts; a scan along the tokens.
    "mixtral": [("model", 3)],
    "mamba": [("backbone", 3)],
    # Losses that select by their labels, or ask for the largest one, run as they are written.
    "deberta_v2_own_loss": [("deberta", 3), ("loss", 1, "whole")],
    "wav2vec2_ctc_own_loss": [("wav2vec2", 3), ("loss", 1, "whole")],
}
# Tried by scripts/try_hf_models.py alone.
TRIED_ELSEWHERE = {
    *("qwen3", "gemma2", "gemma3", "phi3", "modernbert", "deberta_v2", "mixtral_balanced", "qwen3_moe"),
    *("dinov2", "siglip2", "hubert", "wav2vec2_ctc", "clap"),
    *("qwen3_vl", "internvl", "blip", "paligemma", "gemma3_vision"),
}


def test_every_family_is_expected_to_be_taken_or_refused() -> None:
    assert {*EXPECTED, *TRIED_ELSEWHERE} == set(FAMILIES)


@pytest.mark.parametrize("family", EXPECTED)
def test_a_model_as_it_comes_is_split_and_the_same(family: str) -> None:
    torch.manual_seed(0)
    workload = build([family])
    (task,) = workload.tasks
    graph = analysed(workload)
    found = [(m.name.split("/", 1)[1], len(m.ops), *(["whole"] if m.coupled else [])) for m in graph.metaops]
    assert found == EXPECTED[family]
    batch = Batches(task, seed=0).rows(0, 0, task.batch_size)
    parameters = dict(task.module.named_parameters())
    plain = run_plain(task, batch)
    expected = gradients_of(plain, parameters)
    traced = graph.tasks[family]
    loss = run_cut(traced, [batch], {op.index: [0, 1, task.batch_size] for op in traced.ops})
    torch.testing.assert_close(loss, plain)
    for name, gradient in gradients_of(loss, parameters).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
