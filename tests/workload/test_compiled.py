"""Equal layers are compiled once, and give what they give uncompiled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from helpers import toy_workload
from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.operators.whole import LayerCompiler, require_compiler
from spindle_cli.workload.file import TrainSettings


def run(module: nn.Module, rows: int) -> list[Tensor]:
    """An op's outputs, and the gradients of its input and parameters."""
    x = torch.randn(rows, 6, toy_workload.WIDTH, generator=torch.Generator().manual_seed(rows))
    x.requires_grad_()
    module.zero_grad()
    (y,) = module(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]  # type: ignore[list-item]


@pytest.mark.long
def test_equal_layers_of_all_tasks_share_their_code_shape_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    graph = analysed(toy_workload.build())
    compiler = LayerCompiler("aot_eager")
    before = counters["stats"]["unique_graphs"]
    seen = []
    assert torch._dynamo.config.recompile_limit > 8  # of torch: what a plan gives may have more shapes
    for rows in range(2, 6):  # more shapes than torch was to compile
        for task in graph.tasks.values():
            op = task.ops[0]
            plain = task.op_module(op)
            compiled = compiler.compile_layer(plain, op.target)
            assert dict(compiled.named_parameters()).keys() == dict(plain.named_parameters()).keys()
            for module in (compiled, copy.deepcopy(compiled)):
                for found, expected in zip(run(module, rows), run(plain, rows), strict=True):
                    torch.testing.assert_close(found, expected)
        seen.append(counters["stats"]["unique_graphs"] - before)
    assert seen == list(range(1, 5))


def test_an_op_without_a_layer_is_left_alone() -> None:
    graph = analysed(toy_workload.build())
    task = graph.tasks["small"]
    module = task.op_module(task.ops[0])
    assert LayerCompiler("aot_eager").compile_layer(module, None) is module


def test_a_missing_compiler_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    require_compiler(TrainSettings(), "cpu")
    require_compiler(TrainSettings(compile="aot_eager"), "cpu")
    with pytest.raises(WorkloadError, match="inductor cannot compile for cpu here: No working C"):
        require_compiler(TrainSettings(compile="inductor"), "cpu")


@pytest.mark.parametrize(("written", "read"), [(True, "inductor"), (False, None), ("aot_eager", "aot_eager")])
def test_true_is_the_usual_backend(written: object, read: str | None) -> None:
    assert TrainSettings.model_validate({"compile": written}).compile == read
