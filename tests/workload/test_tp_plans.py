"""Which tensor-parallel plans are understood, and what a layer is split into."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.operators.tensor_parallel import kept_whole, layer_split
from spindle_cli.operators.tp_plans import plan_of
from spindle_cli.training.optimizing.groups import optimizer_groups, require_elementwise
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo import bert_moe, digits, multitask_clip, ofasys, qwen_val

WIDTH = 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.layer = Mlp()
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.tied:
            x = x @ self.layer.up.weight.T
        return x.square().mean()


def workload(plan: dict[str, object] | None, tied: bool = False) -> Workload:
    items = [{"x": torch.zeros(WIDTH)} for _ in range(4)]
    plans = {} if plan is None else {Mlp: plan}
    return Workload("w", [Task("t", Model(tied), 4, items)], operators=(Mlp,), tp_plans=plans)


def test_a_split_layer_says_what_is_cut_and_where_sums_are() -> None:
    graph = analysed(workload({"up": "colwise", "down": "rowwise"}))
    split = layer_split(graph.workload, graph.tasks["t"], graph.tasks["t"].ops[0], 2)
    assert split is not None
    assert split.dims == {"layer.up.weight": 0, "layer.up.bias": 0, "layer.down.weight": 1}
    assert (split.entered, split.summed) == (("layer.up",), ("layer.down",))
    assert split.added_once == {"layer.down.bias"}
    assert layer_split(graph.workload, graph.tasks["t"], graph.tasks["t"].ops[0], 3) is None  # of 16 channels


def test_a_layer_whose_split_weight_is_used_whole_beside_it_is_not_split() -> None:
    graph = analysed(workload({"up": "colwise", "down": "rowwise"}, tied=True))
    assert layer_split(graph.workload, graph.tasks["t"], graph.tasks["t"].ops[0], 2) is None


class Adapted(nn.Module):
    """As PEFT puts it in the place of a layer."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("named_by", ["a whole model's plan", "no plan"])
def test_layers_with_adapters_stay_whole_and_it_is_said_where_they_would_be_split(named_by: str) -> None:
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    made = workload(dict(plan) if named_by != "no plan" else None)
    layer = made.tasks[0].module.layer
    layer.up = Adapted(layer.up)
    graph = analysed(made)
    assert layer_split(graph.workload, graph.tasks["t"], graph.tasks["t"].ops[0], 2) is None
    said = "tensor parallelism: Mlp has adapters on up, and what they adapt is not split; it stays whole"
    assert kept_whole(graph) == ((said,) if named_by != "no plan" else ())


def test_torchs_styles_mean_the_same_unless_they_have_settings() -> None:
    plan = plan_of(workload({"up": ColwiseParallel(), "down": RowwiseParallel()}), Mlp())
    assert plan == {"up": "colwise", "down": "rowwise"}
    gathered = workload({"up": ColwiseParallel(output_layouts=Replicate())})
    with pytest.raises(WorkloadError, match=r"found 'ColwiseParallel\(\.\.\.\)', expected one of colwise"):
        plan_of(gathered, Mlp())


def test_ways_of_a_whole_models_plan_that_we_cannot_do_leave_the_layer_whole() -> None:
    assert plan_of(workload({"layers.*.up": "colwise", "layers.*.down": "rowwise"}), Mlp()) == {
        "up": "colwise",
        "down": "rowwise",
    }
    assert plan_of(workload({"layers.*.up": "packed_colwise", "layers.*.down": "rowwise"}), Mlp()) is None
    assert plan_of(workload(None), Mlp()) is None


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_of_whole_matrices_are_refused(name: str) -> None:
    roots = {"t": nn.Linear(2, 2)}
    split = frozenset({"t.weight"})
    require_elementwise(optimizer_groups(TrainSettings(optimizer="AdamW"), roots), split)
    whole = optimizer_groups(TrainSettings(optimizer=name), roots)
    require_elementwise(whole, frozenset())
    with pytest.raises(WorkloadError, match=f"{name} cannot train layers split"):
        require_elementwise(whole, split)


@pytest.mark.parametrize(
    "zoo",
    [
        lambda: digits.build(),
        lambda: multitask_clip.build(tasks=4, size="laptop"),
        lambda: ofasys.build(tasks=4, size="laptop"),
        lambda: qwen_val.build(size="laptop"),
        lambda: bert_moe.build(size="laptop"),
    ],
)
def test_every_chain_of_layers_of_the_zoo_can_be_split(zoo) -> None:
    graph = analysed(zoo())
    chains = [metaop for metaop in graph.metaops if len(metaop.ops) > 1]
    assert chains
    for metaop in chains:
        task = graph.tasks[metaop.task]
        assert all(layer_split(graph.workload, task, task.ops[op], 2) for op in metaop.ops), metaop.name


def test_maps_between_whole_values_stay_whole_and_the_others_are_split() -> None:
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "layers.*.fused": "colwise_gather_output"}
    layer = Mlp()
    layer.add_module("fused", nn.Linear(WIDTH, WIDTH))
    assert plan_of(workload(dict(plan)), layer) == {"up": "colwise", "down": "rowwise"}
    assert plan_of(workload({"up": "colwise_gather_output", "down": "rowwise_split_input"}), Mlp()) is None


def test_what_stays_whole_for_an_unknown_style_is_said() -> None:
    graph = analysed(workload({"layers.*.up": "packed_colwise", "layers.*.down": "rowwise"}))
    (line,) = kept_whole(graph)
    assert line == (
        "tensor parallelism: the plan of Mlp says what is not supported: up: packed_colwise; it stays whole"
    )
    assert kept_whole(analysed(workload({"up": "colwise", "down": "rowwise"}))) == ()
