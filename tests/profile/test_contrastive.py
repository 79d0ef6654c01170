"""What a profile says of a contrastive loss: checked by numbers, run as shares, what its gathers cost."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor

from helpers.analysed import analysed
from helpers.plans import cluster_of
from spindle_cli.costs.beyond_curve import batch_sums_s
from spindle_cli.costs.links import all_gather_s
from spindle_cli.operators.tensor_parallel import describe_ways
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.checking.in_turn import InTurn
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.profile.numeric_check import TaskCheck
from spindle_cli.profile.op.jobs import OpRef, make_jobs
from spindle_cli.profile.profiling import Audience, estimate_profile
from spindle_cli.workload.graph import WorkloadGraph
from spindle_cli.workload.types import Workload

NOBODY = Audience(Console(file=io.StringIO()), lambda _: None)
BATCH, WIDTH = 512, 4
SOURCE = f"""
import torch
from torch import nn
from torch.nn import functional
from spindle_cli import Task, Workload

class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
    def forward(self, a, b):
        logits = self.scale * a @ b.T
        labels = torch.arange(len(logits))
        return (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.loss = nn.Linear(3, {WIDTH}), nn.Linear(3, {WIDTH}), Contrast()
    def forward(self, x):
        return self.loss(self.one(x), self.two(x))

def build(batch={BATCH}):
    items = [{{"x": torch.randn(3, generator=torch.Generator().manual_seed(i))}} for i in range(batch)]
    tasks = [Task("t", Net(), batch, items)]
    return Workload("compared", tasks, operators=(nn.Linear,), contrastive=(Contrast,))
"""


def graph_of() -> WorkloadGraph:
    names: dict[str, object] = {}
    exec(SOURCE, names)
    made = names["build"](12)  # type: ignore[operator]
    assert isinstance(made, Workload)
    return analysed(made)


def checked() -> TaskCheck:
    (task,) = check_numbers(graph_of(), 0, CheckSettings(threads=1)).tasks
    return task


def test_uneven_shares_agree_with_the_whole() -> None:
    task = checked()
    assert (task.whole, task.unchecked) == ({}, {})
    assert "t/loss" in task.checked
    assert 0 < task.largest_difference < 1e-10


@pytest.mark.parametrize("lost", ["gather", "scatter"])
def test_a_gather_that_is_not_taken_is_found(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' rows are missing forward, or their parts of the gradient backward."""
    summed = InTurn.sum_

    def sum_(self: InTurn, tensor: Tensor, *, is_gradient: bool) -> None:
        if is_gradient == (lost == "gather"):
            summed(self, tensor, is_gradient=is_gradient)

    monkeypatch.setattr(InTurn, "sum_", sum_)
    assert list(checked().whole) == ["t/loss"]


def test_shares_are_timed_apart_from_the_whole_and_by_the_batch() -> None:
    graph = graph_of()
    table, ref = make_jobs(graph, 4, 10), OpRef("t", 2)
    assert {(job.rows, job.sums_shares) for job in table.jobs if job.op == ref} == {
        (12, False),
        (6, True),
        (4, True),
        (3, True),
    }
    names: dict[str, object] = {}
    exec(SOURCE, names)
    larger = make_jobs(analysed(names["build"](24)), 4, 10)  # type: ignore[operator]
    assert larger.key(ref, 6, sums_shares=True) != table.key(ref, 6, sums_shares=True)
    assert larger.key(OpRef("t", 0), 6) == table.key(OpRef("t", 0), 6)


def test_an_estimate_has_the_gathers_on_the_clusters_links_and_a_strip_of_pairs(tmp_path: Path) -> None:
    """Both sides' features of 512 samples, 4 numbers of 4 bytes each; 512 x 512 pairs are 1 MiB."""
    path = tmp_path / "compared.py"
    path.write_text(SOURCE)
    cluster = cluster_of(4, devices_per_node=2)
    without, found = (
        next(
            metaop
            for metaop in estimate_profile(
                f"{path}:build",
                tmp_path / "profile.json",
                NOBODY,
                cluster=each,
                device_name="cpu",
                num_devices=4,
                check=False,
            ).metaops
            if metaop.name == "t/loss"
        )
        for each in (None, cluster)
    )
    features = BATCH * WIDTH * 4
    assert found.batch_sums == (BatchSum(kind="gather", num_bytes=features, forward=2, backward=2),)
    assert without.batch_sums == found.batch_sums and not found.coupled
    for bare, point in zip(without.curve, found.curve, strict=True):
        once_s = all_gather_s(features, range(point.dp), cluster)
        assert point.forward_s - bare.forward_s == pytest.approx(2 * once_s)
        assert point.backward_s - bare.backward_s == pytest.approx(2 * once_s)
        assert point.communication_s == pytest.approx(4 * once_s)
    by_share = {share.samples: share for share in found.shares}
    for point in found.curve:
        share = by_share.pop(BATCH // point.dp)
        assert (share.forward_s, share.backward_s) == (point.forward_s, point.backward_s)
        assert share.communication_s == point.communication_s
    assert not by_share
    (memory,) = found.memory
    # Kept is a strip for each way, of 2 MiB for all shares together, beside small features.
    assert memory.kept_bytes[1] == pytest.approx(2 * 2**20, rel=0.02)
    assert 0 < memory.kept_bytes[0] < 2**15


def test_a_gather_costs_what_its_links_say_each_way() -> None:
    cluster = cluster_of(4, devices_per_node=2)
    sums = (BatchSum(kind="gather", num_bytes=1000, forward=2, backward=3),)
    once_s = all_gather_s(1000, (0, 2, 3), cluster)
    assert batch_sums_s(sums, (0, 2, 3), cluster) == pytest.approx((2 * once_s, 3 * once_s))


def test_tensor_parallelism_does_not_split_it() -> None:
    task = graph_of().tasks["t"]
    graph = graph_of()
    assert "gather what it compares" in describe_ways(graph.workload, task, task.ops[-1])
