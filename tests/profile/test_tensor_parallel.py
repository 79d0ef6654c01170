"""Estimates under tensor parallelism."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from helpers.analysed import analysed
from helpers.several_types import cluster_of_types
from spindle_cli.costs.links import all_reduce_s
from spindle_cli.errors import WorkloadError
from spindle_cli.files.cluster import Cluster
from spindle_cli.operators.tensor_parallel import layer_split
from spindle_cli.profile import profiling
from spindle_cli.profile.op.counting import count_work
from spindle_cli.profile.op.jobs import make_jobs
from spindle_cli.profile.op.split_runs import SplitSums, SumCounter, one_part
from spindle_cli.profile.op.tensor_parallel import degrees_on
from spindle_cli.profile.parameters.sizes import parameter_sizes
from spindle_cli.profile.profiling import Audience, estimate_profile
from spindle_cli.profile.types import Device, PhaseTimes
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.layers import TP_PLANS, EncoderLayer

CONFIGS = Path(__file__).parent.parent.parent / "configs"
NOBODY = Audience(Console(file=io.StringIO()), lambda _: None)
WIDTH, HEADS, TOKENS, BATCH = 64, 4, 8, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(WIDTH, HEADS) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def workload(plan: dict[str, str] | None = None) -> Workload:
    items = [{"x": torch.zeros(TOKENS, WIDTH)} for _ in range(BATCH)]
    plans: dict[type[nn.Module], dict[str, str]] = TP_PLANS if plan is None else {EncoderLayer: plan}
    return Workload("split", [Task("task", Model(), BATCH, items)], operators=(EncoderLayer,), tp_plans=plans)


@pytest.fixture(scope="module")
def graph() -> WorkloadGraph:
    return analysed(workload())


def a800() -> Cluster:
    return Cluster.read(CONFIGS / "clusters" / "a800-1x8.yaml")


def test_a_split_layer_does_its_share_of_every_product(graph: WorkloadGraph) -> None:
    task = graph.tasks["task"]
    op = task.ops[1]
    whole = count_work(task, op, BATCH, "float32")
    half = count_work(task, op, BATCH, "float32", layer_split(graph.workload, task, op, 2))
    assert half.forward_flops == whole.forward_flops / 2
    assert half.activation_bytes < whole.activation_bytes
    # Behind attention and behind the MLP: [B, S, W] in float32 each.
    assert half.summed_bytes == (BATCH * TOKENS * WIDTH * 4.0,) * 2
    assert whole.summed_bytes == ()


def test_one_part_runs_by_itself_and_counts_what_it_would_sum(graph: WorkloadGraph) -> None:
    task = graph.tasks["task"]
    op = task.ops[1]
    split = layer_split(graph.workload, task, op, 2)
    assert split is not None
    whole, sums = task.op_module(op), SumCounter((0,), 0, torch.device("cpu"))
    part = one_part(whole, split, sums)
    (out,) = part(torch.zeros(BATCH, TOKENS, WIDTH, requires_grad=True))
    out.sum().backward()
    assert out.shape == (BATCH, TOKENS, WIDTH)
    num_bytes = BATCH * TOKENS * WIDTH * 4
    assert sums.take() == SplitSums((num_bytes,) * 2, (num_bytes,) * 2)
    held = sum(parameter.numel() for parameter in part.parameters())
    assert held < 0.52 * sum(parameter.numel() for parameter in whole.parameters())
    times = sums.take().added_to(PhaseTimes(forward_s=1.0, backward_s=2.0), 2, a800())
    assert times.communication_s == pytest.approx(4 * all_reduce_s(num_bytes, range(2), a800()))
    assert times.forward_s + times.backward_s == pytest.approx(3.0 + times.communication_s)


def test_jobs_have_the_parts_that_fit_the_devices(graph: WorkloadGraph) -> None:
    table = make_jobs(graph, max_devices=4, max_points=8, degrees=(2, 4, 8))
    found = {(BATCH // job.rows, job.tp) for job in table.jobs if job.op.op == 1}
    # of the whole batch, and shares of 1 for micro-batches in every degree
    assert found == {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)} | {(8, 1), (8, 2), (8, 4)}


def test_what_is_whole_on_every_device_is_known_of_split_ops(graph: WorkloadGraph) -> None:
    task = graph.tasks["task"]
    op = task.ops[1]
    split = layer_split(graph.workload, task, op, 2)
    assert split is not None
    tensors = {name: task.root.get_parameter(name) for name in op.parameters}
    num_bytes = {name: tensor.numel() * tensor.itemsize for name, tensor in tensors.items()}
    sizes = parameter_sizes(task, [op], lambda op: layer_split(graph.workload, task, op, 2))
    assert sizes.layer_bytes == sum(num_bytes.values())
    assert sizes.whole_bytes == sum(size for name, size in num_bytes.items() if name not in split.dims)
    assert 0 < sizes.whole_bytes < sizes.layer_bytes
    assert parameter_sizes(task, [op], lambda _: None).whole_bytes == 0


def test_heads_that_do_not_divide_are_not_split(graph: WorkloadGraph) -> None:
    task = graph.tasks["task"]
    assert layer_split(graph.workload, task, task.ops[1], 4) is not None
    assert layer_split(graph.workload, task, task.ops[1], 8) is None


def test_points_say_what_the_sums_take(tmp_path: Path) -> None:
    source = tmp_path / "split.py"
    source.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_tensor_parallel import workload\n\n\ndef build():\n    return workload()\n"
    )
    made = estimate_profile(f"{source}:build", tmp_path / "p.json", NOBODY, cluster=a800())
    points = {(point.dp, point.tp): point for metaop in made.metaops[:1] for point in metaop.curve}
    assert set(points) == {(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4)}
    assert points[4, 1].communication_s == 0
    one_sum_s = all_reduce_s(BATCH / 2 * TOKENS * WIDTH * 2, range(4), a800())
    assert points[2, 4].communication_s == pytest.approx(4 * one_sum_s)


def test_degrees_stay_inside_a_node() -> None:
    assert degrees_on(a800()) == (2, 4, 8)
    assert degrees_on(None) == ()


def test_degrees_are_those_that_nodes_of_the_type_have_room_for() -> None:
    mixed = cluster_of_types({"fast": 8, "slow": 4, "old": 1})
    assert [degrees_on(mixed, kind) for kind in mixed.types] == [(2, 4, 8), (2, 4), ()]
    assert degrees_on(mixed, "none of them") == degrees_on(mixed) == ()


@pytest.mark.parametrize(
    ("name", "own_type"),
    [("Tesla V100-SXM2-32GB", "v100"), ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("T4", None)],
)
def test_a_machines_gpus_are_of_the_clusters_type_that_has_their_name(
    name: str, own_type: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that layers are split as on nodes of that type, over their links, whichever type comes first."""
    here = Device(type="cuda", name=name, memory_bytes=2**35)
    monkeypatch.setattr(profiling, "describe_device", lambda *_: here)
    mixed = cluster_of_types({"h100-80gb": 8, "v100": 4})
    assert profiling._type_of_gpu(mixed, "cuda") == own_type
    assert profiling._type_of_gpu(cluster_of_types({"v100": 4}), "cuda") is None
    assert profiling._type_of_gpu(None, "cuda") is None
    other = profiling._of_type(mixed, own_type)
    assert other is not None
    assert other.type_of[0] == (own_type or "h100-80gb")


@pytest.mark.parametrize(
    ("plan", "expected"),
    [({"mlp.up": "diagonal"}, "found 'diagonal'"), ({"mlp.sideways": "colwise"}, "mlp.sideways is nothing")],
)
def test_a_plan_that_does_not_fit_its_layer_is_refused(plan: dict[str, str], expected: str) -> None:
    graph = analysed(workload(plan))
    task = graph.tasks["task"]
    with pytest.raises(WorkloadError, match=expected):
        layer_split(graph.workload, task, task.ops[1], 2)
