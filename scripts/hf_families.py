"""A workload of whole models of `transformers`, one task each: `scripts/hf_families.py:build`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_models import audio, multimodal, text, vision
from hf_models.samples import Family, Samples

from spindle_cli import Task, Workload

BATCH_SIZE = 6
FAMILIES: dict[str, Callable[[], Family]] = {
    "bert": text.bert,
    "bert_classification": text.bert_classification,
    "bert_masked_lm": text.bert_masked_lm,
    "gpt2": text.gpt2,
    "llama": text.llama,
    "qwen2": text.qwen2,
    "mistral": text.mistral,
    "vit": vision.vit,
    "clip": vision.clip,
    "clip_vision": vision.clip_vision,
    "siglip_vision": vision.siglip_vision,
    "wav2vec2": audio.wav2vec2,
    "whisper_classification": audio.whisper_classification,
    "t5": text.t5,
    "bert_pretraining": text.bert_pretraining,
    "llama_unpadded": text.llama_unpadded,
    "clip_classification": vision.clip_classification,
    "siglip_classification": vision.siglip_classification,
    "wav2vec2_padded": audio.wav2vec2_padded,
    "whisper": audio.whisper,
    "llava": multimodal.llava,
    "qwen2_vl": multimodal.qwen2_vl,
}


def build(families: Sequence[str] = tuple(FAMILIES), batch_size: int = BATCH_SIZE) -> Workload:
    """Each of the families (keys of `FAMILIES`) as a task of that name; they share nothing."""
    made = {name: FAMILIES[name]() for name in families}
    return Workload(
        name="hf_models",
        tasks=[
            Task(name, family.module, batch_size=batch_size, dataset=Samples(family.sample))
            for name, family in made.items()
        ],
        operators=tuple(dict.fromkeys(layer for family in made.values() for layer in family.operators)),
    )
