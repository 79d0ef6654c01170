"""How well a run of `digits` learnt: `python -m spindle_cli.zoo.digits.evaluate --run DIR`.

Plain PyTorch: the model is built as any user would build it, the run's parameters are loaded into it by their
names, and the held-out samples are put to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from spindle_cli.errors import InputError, RunFailedError, SpindleError
from spindle_cli.files.run_files import newest_model
from spindle_cli.workload.types import Workload
from spindle_cli.zoo.digits.build import build
from spindle_cli.zoo.digits.data import Clips, load_split
from spindle_cli.zoo.digits.model import ImageClass, ImageText, SpeechClass, SpeechText


@dataclass(frozen=True)
class Accuracy:
    """Shares of the held-out samples that are answered rightly; chance is 0.1.

    Retrieval: the nearest (by cosine) of all names, or of all held-out images, shows the same digit.
    """

    image_to_text: float
    speech_to_text: float
    speech_to_image: float
    image_classification: float
    speech_classification: float


def load_parameters(workload: Workload, saved: Mapping[str, Tensor], where: str) -> None:
    """Put saved parameters into a workload's modules: '<first task that has it>.<dotted name>'.

    Raises:
        InputError: a parameter is missing, or has another shape.
    """
    seen: set[int] = set()
    with torch.no_grad():
        for task in workload.tasks:
            for name, parameter in _module(task).named_parameters():
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                saved_parameter = saved.get(f"{task.name}.{name}")
                if saved_parameter is None or saved_parameter.shape != parameter.shape:
                    shape = (
                        "missing" if saved_parameter is None else f"of shape {tuple(saved_parameter.shape)}"
                    )
                    raise InputError(
                        f"{where}: {task.name}.{name} is {shape}; expected {tuple(parameter.shape)}",
                        hint="Is it a run of the workload digits?",
                    )
                parameter.copy_(saved_parameter)


def _module(task: object) -> nn.Module:
    module = getattr(task, "module", None)
    assert isinstance(module, nn.Module)
    return module


@torch.no_grad()
def evaluate(workload: Workload) -> Accuracy:
    """Put the held-out samples to the model as it is."""
    modules = {task.name: _module(task) for task in workload.tasks}
    image_text, speech_text = (
        cast("ImageText", modules["image_text"]),
        cast("SpeechText", modules["speech_text"]),
    )
    image_class, speech_class = (
        cast("ImageClass", modules["image_class"]),
        cast("SpeechClass", modules["speech_class"]),
    )
    held_out = load_split(True)
    images = image_text.image(held_out.images.values)
    texts = image_text.text(held_out.texts.values)
    speech = speech_text.speech(held_out.speech.values)
    return Accuracy(
        image_to_text=share(nearest(images, texts, held_out.texts), held_out.images),
        speech_to_text=share(nearest(speech, texts, held_out.texts), held_out.speech),
        speech_to_image=share(nearest(speech, images, held_out.images), held_out.speech),
        image_classification=share(image_class.classifier.predict(images), held_out.images),
        speech_classification=share(speech_class.classifier.predict(speech), held_out.speech),
    )


def nearest(queries: Tensor, gallery: Tensor, clips: Clips) -> Tensor:
    """Digit of the gallery's item nearest to each query: embeddings [n, E] and [m, E] -> [n]."""
    similarity = functional.normalize(queries, dim=-1) @ functional.normalize(gallery, dim=-1).T
    return clips.digits[similarity.argmax(dim=1)]


def share(answered: Tensor, clips: Clips) -> float:
    """Share of the samples whose answer [n] is their digit."""
    return (answered == clips.digits).float().mean().item()


def evaluate_run(run_dir: Path) -> Accuracy:
    """Evaluate what a run has trained.

    Raises:
        InputError: it has saved no parameters, or they are not this model's.
    """
    path = newest_model(run_dir)
    workload = build()
    load_parameters(workload, load_file(path), str(path))
    return evaluate(workload)


def main(arguments: list[str] | None = None) -> int:
    """Parse, evaluate, print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="evaluate", description="Accuracy of a run of digits on held-out samples."
    )
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument(
        "--at-least",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="fail if image-to-text retrieval is below",
    )
    chosen = parser.parse_args(arguments)
    try:
        accuracy = evaluate_run(chosen.run)
        print(json.dumps(asdict(accuracy)) if chosen.json else as_text(accuracy))
        if accuracy.image_to_text < chosen.at_least:
            raise RunFailedError(
                f"image-to-text retrieval is {accuracy.image_to_text:.1%}, below {chosen.at_least:.1%}"
            )
    except SpindleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def as_text(accuracy: Accuracy) -> str:
    """A line per figure."""
    lines = [f"{name.replace('_', ' '):24}{value:7.1%}" for name, value in asdict(accuracy).items()]
    return "\n".join(["held-out samples answered rightly (chance: 10 %)", *lines])


if __name__ == "__main__":
    sys.exit(main())
