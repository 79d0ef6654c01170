"""Layers through torch.compile train what they train without, and are compiled before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from alone import STEPS, TRAIN, run, world_of_one
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from spindle_cli.checkpoint.files import checkpoint_folder
from spindle_cli.errors import WorkloadError
from spindle_cli.operators.whole import LayerCompiler
from spindle_cli.runtime import assembling
from spindle_cli.runtime.part.warm_up import compile_layers

COMPILED = {**TRAIN, "compile": "aot_eager"}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


def graphs() -> int:
    """Graphs compiled so far."""
    return counters["stats"]["unique_graphs"]


def test_chance_buffers_and_updates_are_those_of_plain_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout, running statistics, a power iteration; and the steps find everything compiled."""
    compiled: list[int] = []
    before = graphs()

    def counted(*arguments: object) -> None:
        compile_layers(*arguments)  # type: ignore[arg-type]
        compiled.append(graphs() - before)

    monkeypatch.setattr(assembling, "compile_layers", counted)
    run(tmp_path / "plain")
    run(tmp_path / "compiled", train=COMPILED)
    expected, found = (
        load_file(checkpoint_folder(tmp_path / name, STEPS) / "rank-00000.safetensors")
        for name in ("plain", "compiled")
    )
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        if key.startswith("random"):
            assert torch.equal(found[key], tensor)
        else:
            torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-12, msg=key)
    assert compiled[0] == 0 < compiled[1] == graphs() - before


def test_a_layer_that_cannot_be_compiled_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such instruction")

    broken = LayerCompiler(fail)  # type: ignore[arg-type]
    monkeypatch.setattr(LayerCompiler, "of", lambda train: broken)
    with pytest.raises(WorkloadError, match=r"a layer of moving/layers.* cannot be compiled"):
        run(tmp_path / "run", train=COMPILED)
