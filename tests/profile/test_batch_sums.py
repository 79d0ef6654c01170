"""What a profile says of batch norms: checked by numbers, run as shares, and what their sums cost."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from helpers.analysed import analysed
from helpers.plans import cluster_of
from spindle_cli.costs.links import all_reduce_s
from spindle_cli.files.cluster import Cluster
from spindle_cli.operators import batch_dependent
from spindle_cli.operators.tensor_parallel import describe_ways, layer_split
from spindle_cli.profile.checking.in_turn import InTurn
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.profile.numeric_check import TaskCheck
from spindle_cli.profile.op.jobs import OpRef, make_jobs
from spindle_cli.profile.profiling import Audience, estimate_profile
from spindle_cli.profile.types import MetaOpProfile
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.types import Task, Workload

NOBODY = Audience(Console(file=io.StringIO()), lambda _: None)
SOURCE = """
import torch
from torch import nn
from spindle_cli import Task, Workload

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3, momentum=None)
    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def build():
    items = [{"x": torch.randn(2, 4, generator=torch.Generator().manual_seed(i))} for i in range(24)]
    return Workload("normed", [Task("t", Net(), 12, items)], operators=(Block,))
"""


def graph_of() -> WorkloadGraph:
    names: dict[str, object] = {}
    exec(SOURCE, names)
    made = names["build"]()  # type: ignore[operator]
    assert isinstance(made, Workload)
    return analysed(made)


def checked() -> TaskCheck:
    (task,) = check_numbers(graph_of(), 0, CheckSettings(threads=1)).tasks
    return task


def test_uneven_shares_agree_with_the_whole() -> None:
    task = checked()
    assert (task.checked, task.whole, task.unchecked) == (("t/blocks",), {}, {})
    assert 0 < task.largest_difference < 1e-10


def _of_share_alone(self: InTurn, tensor: Tensor, *, is_gradient: bool) -> None:
    """Nothing is summed."""


@pytest.mark.parametrize("lost", ["statistics", "gradient", "running"])
def test_a_sum_that_is_not_taken_is_found(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    summed = InTurn.sum_

    def sum_(self: InTurn, tensor: Tensor, *, is_gradient: bool) -> None:
        if is_gradient == (lost == "statistics"):
            summed(self, tensor, is_gradient=is_gradient)

    if lost == "running":
        monkeypatch.setattr(batch_dependent, "update_running", lambda *_: None)
    else:
        monkeypatch.setattr(InTurn, "sum_", sum_)
    assert list(checked().whole) == ["t/blocks"]


def test_shares_that_sum_and_a_whole_batch_are_timed_apart() -> None:
    """12 samples on one device are no share; 12 of 24 would be."""
    graph = graph_of()
    table = make_jobs(graph, 4, 10)
    assert {(job.rows, job.sums_shares) for job in table.jobs} == {
        (12, False),
        (6, True),
        (4, True),
        (3, True),
    }
    ref = OpRef("t", 0)
    assert table.key(ref, 6, sums_shares=True) != table.key(ref, 6)
    assert {job.key for job in table.jobs if job.op == ref} >= {
        table.key(ref, 12),
        table.key(ref, 6, sums_shares=True),
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("source") / "normed.py"
    path.write_text(SOURCE)
    return f"{path}:build"


def estimated(source: str, folder: Path, cluster: Cluster | None) -> MetaOpProfile:
    made = estimate_profile(
        source,
        folder / "profile.json",
        NOBODY,
        cluster=cluster,
        device_name="cpu",
        num_devices=4,
        check=False,
    )
    (metaop,) = made.metaops
    return metaop


def test_a_curve_has_the_sums_of_its_shares_on_the_clusters_links(source: str, tmp_path: Path) -> None:
    """Two ops with three norms of 3 channels: 7 numbers each forward, 6 back, 1.5 of them for each op.
    Devices 0 to n - 1 take part, over two nodes from the third device on.
    """
    cluster = cluster_of(4, devices_per_node=2)
    without, found = (estimated(source, tmp_path, each) for each in (None, cluster))
    assert [(each.num_bytes, each.forward, each.backward) for each in found.batch_sums] == [
        (48, 0, 1.5),
        (56, 1.5, 0),
    ]
    assert without.batch_sums == found.batch_sums
    assert [point.dp for point in found.curve] == [1, 2, 3, 4]
    for bare, point in zip(without.curve, found.curve, strict=True):
        forward_s = 1.5 * all_reduce_s(56, range(point.dp), cluster)
        backward_s = 1.5 * all_reduce_s(48, range(point.dp), cluster)
        assert point.forward_s - bare.forward_s == pytest.approx(forward_s)
        assert point.backward_s - bare.backward_s == pytest.approx(backward_s)
        assert point.communication_s == pytest.approx(forward_s + backward_s)
        assert bare.communication_s == 0
    assert found.curve[0].communication_s == 0 < found.curve[1].communication_s


def test_what_has_no_batch_norm_sums_nothing(tmp_path: Path) -> None:
    made = estimate_profile(
        f"{Path(__file__).parent / 'tiny_workload.py'}:build",
        tmp_path / "profile.json",
        NOBODY,
        cluster=cluster_of(2),
        check=False,
    )
    assert not any(metaop.batch_sums for metaop in made.metaops)


def test_an_op_with_other_shares_sums_is_not_split_inside_a_share() -> None:
    """Tensor parallelism inside of an op whose shares sum statistics has no communicator for both."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(self.norm(x))))

    class Net(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).square().mean()

    plan = {Layer: {"up": "colwise", "down": "rowwise"}}
    for layer in (Layer(), Layer().eval()):
        items = [{"x": torch.randn(4)} for _ in range(8)]
        workload = Workload("w", [Task("t", Net(layer), 4, items)], operators=(Layer,), tp_plans=plan)
        task = analysed(workload).tasks["t"]
        split = layer_split(workload, task, task.ops[0], 2)
        assert (split is None) == layer.training
        if layer.training:
            assert "batch norms" in describe_ways(workload, task, task.ops[0])
