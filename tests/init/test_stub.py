"""The names in a stub, whatever tasks and classes are called."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from torch import nn

from spindle_cli.init.model import build_model, snake_case
from spindle_cli.init.stub import Stub, stub_text
from spindle_cli.init.types import Block, FieldSpec, ModelSource, StubLoss, TaskStub

SOURCE = ModelSource("mine", "build", None, False, {})


def draft(tasks: tuple[str, ...], blocks: tuple[tuple[str, str], ...] = ()) -> Stub:
    return Stub(
        named_by="mine:build",
        workload="w",
        source=SOURCE,
        tasks=tuple(TaskStub(name, (FieldSpec("x", (2,)),), StubLoss()) for name in tasks),
        is_alone=False,
        operators=tuple(
            Block(module=module, name=name, count=2, equal=2, first="a.0", parameters=1)
            for module, name in blocks
        ),
        batch_size=4,
    )


def classes(text: str) -> list[str]:
    return [node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize(
    ("tasks", "names"),
    [
        (("image_text", "b"), ["ImageTextSamples", "BSamples"]),
        (("a b", "a-b"), ["Task1ABSamples", "Task2ABSamples"]),
        (("3d", "é", '"'), ["Task13DSamples", "Task2Samples", "Task3Samples"]),
    ],
)
def test_every_task_has_a_class_of_its_own(tasks: tuple[str, ...], names: list[str]) -> None:
    assert classes(stub_text(draft(tasks))) == names


def test_classes_of_one_name_are_imported_by_two() -> None:
    text = stub_text(draft(("a",), (("p", "Block"), ("q", "Block"), ("q", "Outer.Inner"))))
    assert "from p import Block\n" in text
    assert "from q import Block as Block2, Outer\n" in text
    assert "operators=(Block, Block2, Outer.Inner)" in text


class Config:
    def __init__(self, width: int = 2, use_cache: bool = True) -> None:
        self.width, self.use_cache, self.model_type = width, use_cache, "tiny"


class Configured(nn.Module):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.map = nn.Linear(config.width, config.width)


def test_a_model_with_a_configuration_is_made_from_it_without_a_cache() -> None:
    built = build_model(f"{__name__}:Configured", {"width": 5})
    model: Any = built.models["tiny"]
    assert (model.config.width, model.config.use_cache, model.map.weight.is_meta) == (5, False, True)
    assert (built.source.config, built.source.has_cache, built.is_alone) == (Config, True, True)
    kept: Any = build_model(f"{__name__}:Configured", {"use_cache": True}).models["tiny"]
    assert kept.config.use_cache
    made = Stub("t", "w", built.source, (), True, (), 4)
    assert 'settings.setdefault("use_cache", False)' in stub_text(made)


def test_names_of_classes_become_names_of_tasks() -> None:
    assert [snake_case(name) for name in ("Net", "TwoWords", "CLIPModel", "build", "T5Model")] == [
        "net",
        "two_words",
        "clip_model",
        "build",
        "t5_model",
    ]
