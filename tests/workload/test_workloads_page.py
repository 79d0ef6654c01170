"""docs/workloads.md is true: its refusals are those of the code, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

import spindle_cli
from spindle_cli.workload.file import WorkloadFile

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "workloads.md").read_text(encoding="utf-8")


def test_every_refusal_of_the_table_is_one_of_the_code() -> None:
    folder = Path(spindle_cli.__file__).parent
    code = "\n".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    phrases = re.findall(r"\*([^*]+)\*", "\n".join(line.split("|")[1] for line in _table()))
    assert len(phrases) > 10
    for phrase in phrases:
        for part in re.split(r"\.\.\.| n | d$", phrase):
            assert part.strip(" ,") in code, phrase


def _table() -> list[str]:
    return [line for line in PAGE.split("## Refusals")[1].splitlines() if line.startswith("| *")]


def test_the_workload_file_of_the_page_is_valid() -> None:
    text = next(
        block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S) if "spindle.workload" in block
    )
    import yaml

    WorkloadFile.from_data(yaml.safe_load(text), where="page")


def test_the_workload_of_the_page_builds() -> None:
    class Layer(nn.Linear):
        def __init__(self, width: int) -> None:
            super().__init__(width, width)

    class Encoder(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = Layer(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    class Loss(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x - y).pow(2).mean()

    class ImageText(nn.Module):
        def __init__(self, vision: nn.Module, text: nn.Module) -> None:
            super().__init__()
            self.vision, self.text, self.loss = vision, text, Loss()

        def forward(self, image: Tensor, words: Tensor) -> Tensor:
            return self.loss(self.vision(image), self.text(words))

    class Classify(nn.Module):
        def __init__(self, vision: nn.Module) -> None:
            super().__init__()
            self.vision = vision

        def forward(self, image: Tensor) -> Tensor:
            return self.vision(image).pow(2).mean()

    source = re.findall(r"```python\n(.*?)```", PAGE, re.S)[0]
    item = {"image": torch.zeros(256), "words": torch.zeros(256)}
    names = {
        "Vision": Encoder,
        "Text": Encoder,
        "ImageText": ImageText,
        "Classify": Classify,
        "EncoderLayer": Layer,
        "ContrastiveLoss": Loss,
        "pairs": [item] * 64,
        "labelled": [{"image": item["image"]}] * 64,
    }
    exec(source, names)
    from spindle_cli.analysis.analyse import analyse

    metaops = analyse(names["build"]()).metaops
    assert [metaop.name for metaop in metaops] == [
        "image_text/vision",
        "image_text/text",
        "image_text/loss",
        "classify/vision",
    ]
