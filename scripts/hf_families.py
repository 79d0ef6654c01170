"""A workload of whole models of `transformers`, one task each: `scripts/hf_families.py:build`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_models import audio, multimodal, newer_media, newer_multimodal, newer_text, text, vision
from hf_models.samples import Family, Samples

from spindle_cli import Task, Workload

BATCH_SIZE = 6
# By group, which is tried and verified together.
GROUPS: dict[str, dict[str, Callable[[], Family]]] = {
    "first": {
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
    },
    "text": {
        "qwen3": newer_text.qwen3,
        "gemma2": newer_text.gemma2,
        "gemma3": newer_text.gemma3,
        "phi3": newer_text.phi3,
        "modernbert": newer_text.modernbert,
        "deberta_v2": newer_text.deberta_v2,
        "deberta_v2_own_loss": newer_text.deberta_v2_own_loss,
        "mixtral": newer_text.mixtral,
        "mixtral_balanced": newer_text.mixtral_balanced,
        "qwen3_moe": newer_text.qwen3_moe,
        "mamba": newer_text.mamba,
    },
    "media": {
        "dinov2": newer_media.dinov2,
        "siglip2": newer_media.siglip2,
        "hubert": newer_media.hubert,
        "wav2vec2_ctc": newer_media.wav2vec2_ctc,
        "wav2vec2_ctc_own_loss": newer_media.wav2vec2_ctc_own_loss,
        "clap": newer_media.clap,
    },
    "multimodal": {
        "qwen2_vl": multimodal.qwen2_vl,
        "qwen2_5_vl": newer_multimodal.qwen2_5_vl,
        "qwen3_vl": newer_multimodal.qwen3_vl,
        "internvl": newer_multimodal.internvl,
        "blip": newer_multimodal.blip,
        "paligemma": newer_multimodal.paligemma,
        "gemma3_vision": newer_multimodal.gemma3_vision,
    },
}
FAMILIES: dict[str, Callable[[], Family]] = {
    name: make for group in GROUPS.values() for name, make in group.items()
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
