"""What one process has found of a workload serves others, and nothing that means something else to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from spindle_cli.analysis import memo as memos
from spindle_cli.analysis.analyse import analyse, analyse_for_others
from spindle_cli.analysis.memo import AnalysisMemo, NotPortableError, key_of, packed, unpacked
from spindle_cli.analysis.pairs import find
from spindle_cli.analysis.splitting import samples
from spindle_cli.analysis.tracing.behaviour import behaviour_of, name_of
from spindle_cli.errors import InputError
from spindle_cli.files.artifact import to_compact_json
from spindle_cli.workload.graph import Op, TaskGraph, WorkloadGraph
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Classifier, Items, Tower, two_tasks

examine = samples.examine


def handed_on(memo: AnalysisMemo) -> AnalysisMemo:
    """As another process reads it."""
    return AnalysisMemo.from_data(json.loads(to_compact_json(memo)), where="memo.json")


def described(graph: WorkloadGraph) -> Any:
    """All that a graph says, as plain data."""
    return graph.fingerprint, graph.metaops, graph.notes, described_tasks(graph.tasks)


def described_tasks(graphs: Mapping[str, TaskGraph]) -> Any:
    return {
        name: [
            task.values,
            task.fields,
            [(op.kind, str(op.graph), op.coupled, op.coupled_because, op.parameters) for op in task.ops],
            [str(op.shares and op.shares.graph) for op in task.ops],
        ]
        for name, task in graphs.items()
    }


class Shifted(nn.Module):
    """Takes from every sample `rate` times the mean of all."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) - (self.rate * x.mean(0) if self.rate else 0.0)


class Chain(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return functional.mse_loss(x, torch.zeros_like(x))


def chain(*layers: nn.Module) -> Workload:
    return Workload("chain", [Task("t", Chain(*layers), 4, Items(x=(WIDTH,)))], tuple({*map(type, layers)}))


def test_with_what_another_process_has_found_the_graph_is_the_same() -> None:
    graph, memo = analyse_for_others(two_tasks())
    assert described(analyse(two_tasks(), handed_on(memo))) == described(graph)


def test_what_another_process_has_found_is_not_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, memo = analyse_for_others(two_tasks())
    calls: list[str] = []

    def forward(self: Block, x: Tensor) -> Tensor:
        calls.append("block")
        return x + functional.gelu(self.linear(self.norm(x)))

    monkeypatch.setattr(Block, "forward", forward)
    examined: list[Any] = []

    def watched(run: Any, *rest: Any) -> Any:
        examined.append(rest[4])
        return examine(run, *rest)

    monkeypatch.setattr(samples, "examine", watched)
    analyse(two_tasks(), handed_on(memo))
    assert not calls
    assert not [module for module in examined if module is not None]
    analyse(two_tasks(), memo.model_copy(update={"observed": {}, "findings": {}, "mixes": {}}))
    assert calls
    assert [module for module in examined if module is not None]


def test_what_is_found_of_evaluations_is_not_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in eval mode are others than in training, and in the memo as well."""
    workload = two_tasks()
    workload.tasks[1].eval_dataset = workload.tasks[1].dataset
    graph, memo = analyse_for_others(workload, evaluates=True)
    assert list(graph.evaluations) == ["classify"]
    _, trained = analyse_for_others(two_tasks())
    assert memo.observed.keys() > trained.observed.keys()
    calls: list[bool] = []

    def forward(self: Block, x: Tensor) -> Tensor:
        calls.append(self.training)
        return x + functional.gelu(self.linear(self.norm(x)))

    monkeypatch.setattr(Block, "forward", forward)
    again = analyse(workload, handed_on(memo), evaluates=True)
    assert not calls
    assert described(again) == described(graph)
    assert described_tasks(again.evaluations) == described_tasks(graph.evaluations)
    analyse(workload, handed_on(trained), evaluates=True)
    assert calls
    assert not any(calls)


def test_whether_a_loss_compares_samples_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check = find._check

    def watched(task: TaskGraph, loss: Op) -> None:
        checked.append(task.task.name)
        check(task, loss)

    monkeypatch.setattr(find, "_check", watched)
    graph, memo = analyse_for_others(contrasts("clip"))
    assert (checked, list(memo.pairs.values())) == (["clip"], [None])
    again = analyse(contrasts("clip"), handed_on(memo))
    assert (checked, described(again)) == (["clip"], described(graph))
    assert again.tasks["clip"].ops[-1].contrasts
    other, whole = analyse_for_others(contrasts("ranked"), handed_on(memo))  # another loss
    assert checked == ["clip", "ranked"]
    assert not other.tasks["ranked"].ops[-1].contrasts
    assert len(whole.pairs) == 2
    assert described(analyse(contrasts("ranked"), handed_on(whole))) == described(other)
    assert checked == ["clip", "ranked"]


def contrasts(name: str) -> Workload:
    """CLIP's loss; or one over the samples' ranks, which cannot be split."""
    items = Items(image=(WIDTH,), words=(WIDTH,))
    return Workload(name, [Task(name, Compared(ranked=name == "ranked"), 4, items)], (Block,))


class Compared(nn.Module):
    def __init__(self, *, ranked: bool) -> None:
        super().__init__()
        self.block, self.ranked = Block(), ranked

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        logits = self.block(image) @ words.T
        if self.ranked:
            return logits.sort(0).values.diagonal().mean()
        return functional.cross_entropy(logits, torch.arange(len(logits)))


def test_a_layer_with_another_setting_is_judged_by_itself() -> None:
    """The launcher's layer mixes nothing; the worker's, which has changed since, does."""
    _, memo = analyse_for_others(chain(Shifted(0.0)))
    found = analyse(chain(Shifted(0.5)), handed_on(memo))
    assert [op.coupled for op in found.tasks["t"].ops] == [
        op.coupled for op in analyse(chain(Shifted(0.5))).tasks["t"].ops
    ]
    assert any(op.coupled for op in found.tasks["t"].ops)


def test_reasons_are_handed_on_with_their_place() -> None:
    graph, memo = analyse_for_others(chain(Shifted(0.5)))
    assert graph.notes
    assert analyse(chain(Shifted(0.5)), handed_on(memo)).notes == graph.notes


def test_functions_of_torch_are_known_by_name_in_every_process() -> None:
    names = {
        torch.arange: "torch.arange",
        functional.cross_entropy: "torch.nn.functional.cross_entropy",
        len: "builtins.len",
    }
    assert {function: name_of(function) for function in names} == names
    assert key_of(name_of(lambda x: x)) is None


class Opaque:
    __slots__ = ()


def test_what_is_known_by_its_place_in_memory_alone_is_not_handed_on() -> None:
    layer = Shifted(0.0)
    layer.extra = Opaque()
    assert behaviour_of(layer).startswith(memos.HERE)
    assert not behaviour_of(Shifted(0.0)).startswith(memos.HERE)
    _, memo = analyse_for_others(chain(layer))
    _, without = analyse_for_others(chain(Shifted(0.0)))
    assert not memo.observed
    assert len(without.observed) == 2  # for the batch and for twice the batch
    assert len(memo.findings) == len(without.findings) - 1
    assert len(memo.mixes) == len(without.mixes) - 1
    assert key_of(f"{memos.HERE}1234 x") is None
    assert key_of("<function f at 0x7f12>") is None
    assert key_of("<function f>") is not None


def test_what_another_torch_has_found_is_found_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, memo = analyse_for_others(two_tasks())
    wrong = {key: {"plain": 1} for key in memo.observed}
    other = memo.model_copy(update={"torch_version": "1.0", "observed": wrong})
    assert described(analyse(two_tasks(), other)) == described(graph)


def test_a_task_that_the_launcher_did_not_see_is_analysed_as_ever() -> None:
    _, memo = analyse_for_others(two_tasks())
    alone = Workload("alone", [Task("c", Classifier(Tower(depth=1)), 4, Items(image=(4, 6), label=((), 4)))])
    assert described(analyse(alone, handed_on(memo))) == described(analyse(alone))


def meta(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def test_values_come_back_as_they_were() -> None:
    turned = torch.empty(2, 3, dtype=torch.bfloat16).T
    value = (turned, [torch.empty(4).requires_grad_()], {"a": None, "b": (1, 2.5, True, "x")}, ())
    found = unpacked(json.loads(json.dumps(packed(value))), meta)
    assert (found[0].shape, found[0].stride(), found[0].dtype) == ((3, 2), (1, 3), torch.bfloat16)
    assert not found[0].requires_grad
    assert found[1][0].requires_grad
    assert found[2:] == (value[2], ())
    assert type(found[1]) is list


@pytest.mark.parametrize("value", [nn.Parameter(torch.zeros(1)), object(), {1: 2}, torch.Size([2]), {3}])
def test_values_of_other_types_are_found_by_each_process_itself(value: Any) -> None:
    with pytest.raises(NotPortableError):
        packed((value,))


@pytest.mark.parametrize(
    "value",
    [
        3,
        {},
        {"tensor": [2, 2], "strides": [2], "dtype": "float32", "grad": False},
        {"tensor": [-1], "strides": [1], "dtype": "float32", "grad": False},
        {"tensor": [2**62, 8], "strides": [8, 1], "dtype": "float32", "grad": False},
        {"tensor": [2], "strides": [1], "dtype": "nn", "grad": False},
        {"tensor": [2], "strides": [1], "dtype": "int64", "grad": True},
        {"tuple": [{"tensor": [2]}]},
    ],
)
def test_what_is_no_value_of_a_call_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"memo\.json: observed\.call.*no value of a call"):
        AnalysisMemo.from_data(data_of(observed={"call": value}), where="memo.json")


@pytest.mark.parametrize(
    "state",
    [
        {"kind": "Batch", "attributes": {}},
        {"kind": "Batch", "attributes": {"dim": "x", "outer": 1, "inner": 1, "numbered": 0}},
        {"kind": "Whole", "attributes": {"dim": 0}},
        {"kind": "Reduced", "attributes": {"degree": 0}},
    ],
)
def test_what_is_no_state_is_refused(state: Any) -> None:
    findings = {"call": {"results": [], "states": [state]}}
    with pytest.raises(InputError, match=r"memo\.json: findings\.call\.states"):
        AnalysisMemo.from_data(data_of(findings=findings), where="memo.json")


def data_of(**parts: Any) -> dict[str, Any]:
    whole = {"observed": {}, "findings": {}, "mixes": {}, **parts}
    return {"schema": "spindle.analysis-memo/1", "torch_version": torch.__version__, **whole}
