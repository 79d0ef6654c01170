"""Hugging Face layers as operators: the example is one model, whole or op by op."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'spindle-cli[hf]')")

from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from helpers.analysed import analysed
from spindle_cli.analysis.localise import load_local
from spindle_cli.operators.tensor_parallel import layer_split
from spindle_cli.operators.tp_plans import plan_of
from spindle_cli.training.batches import Batches
from spindle_cli.workload.building.load import LoadedWorkload, load, load_abstract
from spindle_cli.workload.graph import ParameterTable
from spindle_cli.workload.types import Workload

from .shares import gradients_of, run_plain, run_shares

SOURCE = str(Path(__file__).parents[2] / "examples" / "hf_two_tasks.py") + ":build"


@pytest.fixture(scope="module")
def loaded() -> LoadedWorkload:
    return load(SOURCE)


def test_the_metagraph_of_the_example(loaded: LoadedWorkload) -> None:
    graph = analysed(loaded.workload)
    assert [(m.name, len(m.ops), m.inputs, m.parameters) for m in graph.metaops] == [
        ("classify/vision", 3, (), "vision.layers"),
        ("describe/vision", 3, (), "vision.layers"),
        ("describe/language", 3, ("describe/vision",), "language.layers"),
    ]
    assert not any(metaop.coupled for metaop in graph.metaops)
    assert analysed(load_abstract(SOURCE).workload).fingerprint == graph.fingerprint


@pytest.mark.parametrize("dp", [1, 4])
def test_ops_in_shares_give_the_plain_loss_and_gradients(loaded: LoadedWorkload, dp: int) -> None:
    graph = analysed(loaded.workload)
    parameters = ParameterTable.of(graph).parameters
    for task in loaded.workload.tasks:
        batch = Batches(task, seed=0).rows(0, 0, task.batch_size)
        plain = run_plain(task, batch)
        expected = gradients_of(plain, parameters)
        loss = run_shares(graph.tasks[task.name], batch, dict.fromkeys(range(20), dp))
        torch.testing.assert_close(loss, plain)
        for name, gradient in gradients_of(loss, parameters).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def test_a_part_of_the_model_has_the_values_of_the_whole(loaded: LoadedWorkload) -> None:
    local = load_local(SOURCE, {"describe": [3, 4]})
    found = dict(local.workload.tasks[1].module.named_parameters())
    expected = dict(load(SOURCE).workload.tasks[1].module.named_parameters())
    real = {name for name, parameter in found.items() if not parameter.is_meta}
    layers = ("language.layers.0.", "language.layers.1.")
    own = {name for name in found if name.startswith(layers)}
    assert own and real == own
    assert all(torch.equal(found[name], expected[name]) for name in real)


def test_the_example_learns(loaded: LoadedWorkload) -> None:
    tasks = load(SOURCE).workload.tasks
    parameters = {id(p): p for task in tasks for p in task.module.parameters()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=3e-3)
    losses = []
    for step in range(25):
        total = sum(task.module(**Batches(task, 0).rows(step, 0, task.batch_size)) for task in tasks)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("metaop", "maps"), [("classify/vision", 6), ("describe/language", 7)])
def test_layers_are_split_by_their_own_plans_and_by_those_of_their_configurations(
    metaop: str, maps: int, loaded: LoadedWorkload
) -> None:
    graph = analysed(loaded.workload)
    found = graph.by_name[metaop]
    task = graph.tasks[found.task]
    halves = layer_split(graph.workload, task, task.ops[found.ops[1]], 2)
    assert halves is not None
    assert sum(name.endswith("weight") for name in halves.dims) == maps
    assert layer_split(graph.workload, task, task.ops[found.ops[1]], 8) is None  # it has 2 or 4 heads


def test_a_plan_of_a_whole_model_is_taken_as_it_is() -> None:
    config = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32)
    layer = LlamaDecoderLayer(config, layer_idx=0)
    given = Workload("given", [], tp_plans={LlamaDecoderLayer: LlamaConfig.base_model_tp_plan})
    own = {f"self_attn.{name}_proj": "rowwise" if name == "o" else "colwise" for name in ("q", "k", "v", "o")}
    mlp = {f"mlp.{name}_proj": "rowwise" if name == "down" else "colwise" for name in ("gate", "up", "down")}
    assert plan_of(given, layer) == plan_of(Workload("none", []), layer) == {**own, **mlp}
    assert plan_of(Workload("whole", [], tp_plans={LlamaDecoderLayer: {}}), layer) is None
    norms = Qwen3DecoderLayer(Qwen3Config(hidden_size=16, num_attention_heads=4, head_dim=4), layer_idx=0)
    assert plan_of(Workload("none", []), norms)["self_attn.q_norm"] == "partial"
