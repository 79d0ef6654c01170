"""Points of layers whose devices share out the sequence."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import spindle_cli.profile.checking.run as checking
from helpers.analysed import analysed
from spindle_cli.costs.links import all_gather_s
from spindle_cli.errors import WorkloadError
from spindle_cli.files.cluster import Cluster
from spindle_cli.operators.tensor_parallel import LayerSplit, layer_split
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.profile.estimating.estimate import between
from spindle_cli.profile.estimating.fake_memory import fake_memory
from spindle_cli.profile.op.counting import count_work
from spindle_cli.profile.op.split_runs import SplitSums, SumCounter, one_part
from spindle_cli.profile.op.tensor_parallel import OwnPositions
from spindle_cli.profile.profiling import Audience, estimate_profile
from spindle_cli.profile.types import PhaseTimes
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import Op, WorkloadGraph
from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.layers import TP_PLANS, EncoderLayer

CONFIGS = Path(__file__).parent.parent.parent / "configs"
WIDTH, HEADS, POSITIONS, BATCH = 16, 4, 9, 4
ELEMENTS = BATCH * POSITIONS * WIDTH


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(WIDTH, HEADS) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def workload(*, shared: bool = True) -> Workload:
    generator = torch.Generator().manual_seed(0)
    items = [{"x": torch.randn(POSITIONS, WIDTH, generator=generator)} for _ in range(2 * BATCH)]
    task = Task("task", Model(), BATCH, items)
    return Workload("long", [task], operators=(EncoderLayer,), tp_plans=TP_PLANS, tp_sequence=shared)


@pytest.fixture(scope="module")
def graph() -> WorkloadGraph:
    return analysed(workload())


def a800() -> Cluster:
    return Cluster.read(CONFIGS / "clusters" / "a800-1x8.yaml")


def middle(graph: WorkloadGraph, degree: int = 2, *, shared: bool = True) -> tuple[Op, LayerSplit]:
    task = graph.tasks["task"]
    split = layer_split(graph.workload, task, task.ops[1], degree)
    assert split is not None
    assert split.sequence is not None
    return task.ops[1], split if shared else replace(split, sequence=None)


def test_one_part_takes_and_gives_the_most_positions_that_a_device_has(graph: WorkloadGraph) -> None:
    op, split = middle(graph)
    sums = SumCounter((0,), 0, torch.device("cpu"))
    positions = OwnPositions(split, sums, [torch.zeros(BATCH, POSITIONS, WIDTH, requires_grad=True)])
    module = positions.called(one_part(graph.tasks["task"].op_module(op), split, sums))
    assert positions.inputs[0].shape == (BATCH, 5, WIDTH)
    assert positions.inputs[0].requires_grad
    (out,) = module(*positions.inputs)
    assert out.shape == (BATCH, 5, WIDTH)
    out.sum().backward()
    num_bytes = ELEMENTS * 4
    # A gather and a scatter for each of two split parts, in each pass.
    assert sums.take() == SplitSums(forward_along=(num_bytes,) * 4, backward_along=(num_bytes,) * 4)
    times = sums.take().added_to(PhaseTimes(forward_s=1.0, backward_s=2.0), 2, a800())
    assert times.communication_s == pytest.approx(8 * all_gather_s(num_bytes, range(2), a800()))
    assert times.forward_s == pytest.approx(1.0 + times.communication_s / 2)


def test_an_estimate_counts_what_moves_along_the_sequence_and_less_work_of_norms(
    graph: WorkloadGraph,
) -> None:
    task = graph.tasks["task"]
    op, split = middle(graph)
    parts = count_work(task, op, BATCH, "float32", split)
    whole = count_work(task, op, BATCH, "float32", replace(split, sequence=None))
    assert parts.summed_bytes == ()
    assert parts.along == ((ELEMENTS * 4.0,) * 4,) * 2
    assert whole.along == ((), ())
    assert whole.summed_bytes == (ELEMENTS * 4.0,) * 2
    assert parts.forward_flops == whole.forward_flops
    half = between(
        count_work(task, op, 2, "float32", split), count_work(task, op, 4, "float32", split), 2, 4, 3
    )
    assert half is not None
    assert half.along == ((ELEMENTS * 3.0,) * 4,) * 2


def test_what_lies_between_the_split_parts_is_kept_for_the_own_positions_alone(graph: WorkloadGraph) -> None:
    """Of an encoder layer's stream: both sums of residuals, and mean and deviation of each norm. What goes
    into the colwise maps stays whole, for their weights' gradients.
    """
    task = graph.tasks["task"]
    op, split = middle(graph)
    parts, whole = (
        fake_memory(task, op, BATCH, "float32", TrainSettings(), each)
        for each in (split, replace(split, sequence=None))
    )
    less, statistics = BATCH * 4 * WIDTH * 4, BATCH * 4 * 4  # of 9 positions, a device has 5
    assert whole.kept_bytes - parts.kept_bytes == 2 * less + 2 * 2 * statistics


def test_points_and_memory_say_that_the_sequence_is_shared_out(tmp_path: Path) -> None:
    nobody = Audience(Console(file=io.StringIO()), lambda _: None)
    made: dict[bool, Any] = {}
    for shared in (True, False):
        source = tmp_path / f"long_{shared}.py"
        source.write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "from test_sequence_points import workload\n\n\n"
            f"def build():\n    return workload(shared={shared})\n"
        )
        out = tmp_path / f"{shared}.json"
        (made[shared],) = estimate_profile(f"{source}:build", out, nobody, cluster=a800()).metaops
    entries = {shared: {e.tp: e for e in metaop.memory if e.first_op == 0} for shared, metaop in made.items()}
    assert entries[False][2].joined_bytes == 0
    assert entries[True][1].joined_bytes == 0
    assert entries[True][2].joined_bytes == ELEMENTS * 2  # in bfloat16
    assert entries[True][2].kept_bytes[1] < entries[False][2].kept_bytes[1]
    assert {e.tp: e.joined_bytes for e in made[True].memory if e.first_op == 3} == {1: 0, 2: 0, 4: 0}


def test_the_check_finds_a_norm_whose_gradient_is_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = analysed(workload())
    settings = CheckSettings(by_words=True)
    (found,) = check_numbers(graph, 0, settings).tasks
    assert not found.whole

    def wrong(*asked: Any) -> LayerSplit | None:
        split = layer_split(*asked)
        assert split is not None
        assert split.sequence is not None
        return replace(split, sequence=replace(split.sequence, partial=frozenset()))

    monkeypatch.setattr(checking, "layer_split", wrong)
    with pytest.raises(
        WorkloadError, match=r"a part of the sequence each, the gradient of .*norm"
    ) as refused:
        check_numbers(graph, 0, settings)
    assert "tp_sequence=False" in str(refused.value.hint)


def test_the_check_leaves_a_wrong_plan_of_maps_to_verify() -> None:
    """It is no more right where all devices have the whole sequence."""
    made = workload()
    made.tp_plans = {EncoderLayer: {"attention.query": "colwise", "attention.out": "rowwise"}}
    (found,) = check_numbers(analysed(made), 0, CheckSettings(by_words=True)).tasks
    assert not found.whole
