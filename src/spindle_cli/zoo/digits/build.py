"""The workload `digits`: five tasks over three shared encoders, on real data."""

from __future__ import annotations

from collections.abc import Mapping

from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.digits.data import DigitPairs
from spindle_cli.zoo.digits.model import (
    Classifier,
    ImageClass,
    ImageEncoder,
    ImageSpeech,
    ImageText,
    SpeechClass,
    SpeechEncoder,
    SpeechText,
    TextEncoder,
)
from spindle_cli.zoo.layers import TP_PLANS, ContrastiveLoss, EncoderLayer
from spindle_cli.zoo.options import choose_batch_sizes

BATCH_SIZES = {"image_text": 48, "speech_text": 32, "image_speech": 24, "image_class": 16, "speech_class": 40}


def build(batch_sizes: Mapping[str, int] | None = None) -> Workload:
    """Five tasks: three contrastive ones between images, names and speech of digits, two that classify.

    Args:
        batch_sizes: samples per iteration of some or all tasks; BATCH_SIZES for the others.

    Raises:
        WorkloadError: `batch_sizes` names an unknown task.
    """
    sizes = choose_batch_sizes("digits", BATCH_SIZES, batch_sizes)
    image = ImageEncoder(width=64, layers=4, heads=4)
    text = TextEncoder(width=48, layers=2, heads=4)
    speech = SpeechEncoder(width=64, layers=4, heads=4)
    modules = {
        "image_text": ImageText(image, text),
        "speech_text": SpeechText(speech, text),
        "image_speech": ImageSpeech(image, speech),
        "image_class": ImageClass(image),
        "speech_class": SpeechClass(speech),
    }
    datasets = {
        "image_text": DigitPairs(["image", "text"], repeats=4),
        "speech_text": DigitPairs(["speech", "text"], repeats=4),
        "image_speech": DigitPairs(["image", "speech"], repeats=4),
        "image_class": DigitPairs(["image"]),
        "speech_class": DigitPairs(["speech"]),
    }
    return Workload(
        name="digits",
        tasks=[Task(name, modules[name], sizes[name], datasets[name]) for name in modules],
        operators=(EncoderLayer, ContrastiveLoss, Classifier),
        coupled=(ContrastiveLoss,),
        tp_plans=TP_PLANS,
    )
