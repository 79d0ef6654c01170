"""A rank that builds only its own parameters has, bit for bit, what a full build gives."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from helpers.analysed import analyses
from helpers.tiers import every_other
from spindle_cli.analysis import localise
from spindle_cli.analysis.analyse import analyse
from spindle_cli.analysis.localise import load_local, rebind
from spindle_cli.workload.building.load import Births, load, load_abstract, parameters_born
from spindle_cli.workload.building.partial import drawing_as_if_real
from spindle_cli.workload.graph import ParameterTable, WorkloadGraph

from . import shapes_of_models

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
    pytest.mark.usefixtures("analysed_once"),
]

BUILDS = ["mixed", "copied", "reading", "tied", "loaded", "normed", "parametrized"]
IN_PART = ["mixed", "copied", "tied", "loaded", "normed", "parametrized"]


def source(build: str) -> str:
    return f"{__package__}.inits:{build}"


@cache
def parameters_of_ops(build: str) -> list[set[str]]:
    return [set(op.parameters) for op in analysed(source(build)).tasks["only"].ops]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("op", [0, 1, 2])
def test_wanted_parameters_have_the_values_of_a_full_build_and_others_no_memory(build: str, op: int) -> None:
    full = load(source(build))
    state_after = torch.get_rng_state()
    used = parameters_of_ops(build)[op]
    expected = dict(full.workload.tasks[0].module.named_parameters(remove_duplicate=False))
    local = load_local(source(build), {"only": [op]})
    assert torch.equal(torch.get_rng_state(), state_after)
    found = dict(local.workload.tasks[0].module.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    real = {name for name, parameter in found.items() if not parameter.is_meta}
    assert used <= real
    assert all(torch.equal(found[name], expected[name]) for name in real)
    names_of_used = {n for n, p in expected.items() if any(p is expected[u] for u in used)}
    assert real == names_of_used


@pytest.mark.parametrize("build", IN_PART)
def test_no_full_build_is_needed(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("fell back to a full build")

    monkeypatch.setattr(localise, "_keep_only", refuse)
    load_local(source(build), {"only": [1]})


def test_what_a_hook_has_computed_of_dropped_parameters_takes_no_memory_either() -> None:
    local = load_local(source("normed"), {"only": [1]})
    layers = [each for each in local.workload.tasks[0].module.modules() if hasattr(each, "weight_g")]
    assert [each.weight.device.type for each in layers] == ["meta", "cpu", "meta"]


@pytest.mark.parametrize("build", BUILDS)
def test_an_abstract_workload_is_analysed_like_a_real_one(build: str) -> None:
    abstract = analysed_abstractly(source(build))
    assert all(p.is_meta for task in abstract.workload.tasks for p in task.module.parameters())
    assert abstract.fingerprint == analysed(source(build)).fingerprint


def test_buffers_are_those_of_a_full_build() -> None:
    expected = dict(load(source("mixed")).workload.tasks[0].module.named_buffers())
    found = dict(load_local(source("mixed"), {"only": [0]}).workload.tasks[0].module.named_buffers())
    assert expected and all(torch.equal(found[name], expected[name]) for name in expected)


def test_nothing_wanted_means_nothing_real() -> None:
    local = load_local(source("mixed"), {})
    assert all(parameter.is_meta for parameter in local.workload.tasks[0].module.parameters())


@cache
def analysed(where: str) -> WorkloadGraph:
    return analyses().of(load(where).workload)[0]


@cache
def analysed_abstractly(where: str) -> WorkloadGraph:
    return analyse(load_abstract(where).workload)


@pytest.mark.parametrize("name", every_other(shapes_of_models.ALL))
def test_every_shape_of_model_can_be_built_abstractly_and_in_part(name: str) -> None:
    where = f"{shapes_of_models.ALL[name].__module__}:{name}"
    real, graph = analysed(where), analysed_abstractly(where)
    full = ParameterTable.of(real)
    assert graph.fingerprint == real.fingerprint
    task = next(iter(graph.tasks))
    asked: list[str] = []

    def choose(graph: WorkloadGraph) -> dict[str, list[int]]:
        asked.append(graph.fingerprint)
        return {task: [len(graph.tasks[task].ops) - 1]}

    local = ParameterTable.of(analyse(load_local(where, choose).workload))
    last = (task, len(graph.tasks[task].ops) - 1)
    for key, parameter in local.parameters.items():
        assert parameter.is_meta == (last not in full.users[key]), key
        assert parameter.is_meta or torch.equal(parameter, full.parameters[key])
    assert asked[0] == graph.fingerprint


@pytest.mark.parametrize("name", shapes_of_models.ALL)
def test_a_graph_serves_another_build_of_the_same_workload(name: str) -> None:
    where = f"{shapes_of_models.ALL[name].__module__}:{name}"
    workload = load(where).workload
    rebound = rebind(analysed_abstractly(where), workload)
    real = analyse(workload)  # behind: it puts into the modules what some graphs need
    if rebound is None:  # it needs what tracing has put into the modules
        assert any(
            "_tensor_constant" in str(n.target)
            for t in real.tasks.values()
            for o in t.ops
            for n in o.graph.nodes
        )
        return
    assert rebound.fingerprint == real.fingerprint
    found, expected = ParameterTable.of(rebound), ParameterTable.of(real)
    assert found.users == expected.users
    assert all(found.parameters[key] is parameter for key, parameter in expected.parameters.items())
    for task in real.tasks.values():
        assert [op.parameters for op in rebound.tasks[task.task.name].ops] == [
            op.parameters for op in task.ops
        ]


def test_a_graph_does_not_serve_another_workload() -> None:
    graph = analysed_abstractly(source("mixed"))
    for build in ("copied", "reading"):
        assert rebind(graph, load(source(build)).workload) is None


def test_what_the_user_puts_on_the_meta_device_is_not_drawn_for() -> None:
    def build() -> tuple[nn.Linear, torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 3, device="meta")
        nn.init.orthogonal_(layer.weight)
        return layer, torch.rand(2)

    births = Births()
    with parameters_born(births, keep=lambda _: False), drawing_as_if_real(births):
        layer, found = build()
    assert layer.weight.is_meta
    assert torch.equal(found, build()[1])
