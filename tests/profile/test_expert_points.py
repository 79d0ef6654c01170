"""Points of layers whose devices share out experts: what one device runs, and what is counted of it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import spindle_cli.profile.checking.run as checking
from helpers.analysed import analysed
from spindle_cli.costs.links import all_gather_s
from spindle_cli.errors import WorkloadError
from spindle_cli.files.cluster import Cluster
from spindle_cli.operators.experts.region import Dispatch
from spindle_cli.operators.tensor_parallel import LayerSplit, layer_split
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.profile.op.counting import count_work
from spindle_cli.profile.op.split_runs import SplitSums, SumCounter, one_part
from spindle_cli.profile.op.tensor_parallel import OwnPositions
from spindle_cli.profile.parameters.sizes import parameter_sizes
from spindle_cli.profile.profiling import Audience, estimate_profile
from spindle_cli.profile.types import PhaseTimes
from spindle_cli.workload.graph import Op, WorkloadGraph
from spindle_cli.zoo import bert_moe

CONFIGS = Path(__file__).parents[2] / "configs"
FLOAT = 4
# Of the laptop size, in three pairs: 4 experts of 10 places for each of 16 tokens of width 32.
SAMPLES, EXPERTS, PLACES, WIDTH, HIDDEN = 7, 4, 10, 32, 64


@pytest.fixture(scope="module")
def graph() -> WorkloadGraph:
    spec = replace(bert_moe.MODELS["laptop"], pairs=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bert_moe.MODELS, "laptop", spec)
        return analysed(bert_moe.build("laptop", {"fill_in": SAMPLES}))


def middle(graph: WorkloadGraph, degree: int) -> tuple[Op, LayerSplit]:
    task = graph.tasks["fill_in"]
    split = layer_split(graph.workload, task, task.ops[1], degree)
    assert split is not None
    return task.ops[1], split


def test_one_part_has_the_most_samples_and_experts_that_a_device_has(graph: WorkloadGraph) -> None:
    """7 samples over 3 devices are 3, 2, 2, and 4 experts 1, 1, 2: the part has 3 and 2."""
    op, split = middle(graph, 3)
    task = graph.tasks["fill_in"]
    sums = SumCounter((0,), 0, torch.device("cpu"))
    whole = [torch.zeros(task.values[name].shape, requires_grad=True) for name in op.inputs]
    positions = OwnPositions(split, sums, whole)
    module = positions.called(one_part(task.op_module(op), split, sums))
    assert [len(given) for given in positions.inputs] == [3, 3]
    sizes = {tuple(leaf.shape) for leaf in module.parameters()}
    assert (2, WIDTH, HIDDEN) in sizes
    assert (EXPERTS, WIDTH, HIDDEN) not in sizes
    outputs = module(*positions.inputs)
    assert [len(output) for output in outputs] == [3, 3]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    there, back = 3 * EXPERTS * PLACES * WIDTH * FLOAT, SAMPLES * 2 * PLACES * WIDTH * FLOAT
    assert sums.take() == SplitSums(forward_along=(there, back), backward_along=(there, back))


def test_an_exchange_takes_as_long_as_a_gather_of_what_a_device_has() -> None:
    cluster = Cluster.read(CONFIGS / "clusters" / "a800-1x8.yaml")
    sums = SumCounter((0,), 0, torch.device("cpu"))
    dispatch = Dispatch(sums, (2, 2), (2, 2))
    sent = torch.zeros(2, 4, 1000)
    assert dispatch.to_samples(dispatch.to_experts(sent)).shape == sent.shape
    times = sums.take().added_to(PhaseTimes(forward_s=1.0, backward_s=2.0), 2, cluster)
    assert times.forward_s == pytest.approx(1.0 + 2 * all_gather_s(sent.nbytes, range(2), cluster), rel=1e-12)
    assert times.backward_s == 2.0


def test_what_is_exchanged_is_counted_without_data(graph: WorkloadGraph) -> None:
    op, split = middle(graph, 2)
    work = count_work(graph.tasks["fill_in"], op, 6, "float32", split)
    moved = 3 * EXPERTS * PLACES * WIDTH * FLOAT  # 3 of 6 samples; then 6 samples of 2 of 4 experts
    assert work.along == ((moved, moved), (moved, moved))
    assert work.summed_bytes == ()
    whole = count_work(graph.tasks["fill_in"], op, 6, "float32")
    # Experts do half as much for all samples, the rest of the layer all for half of them.
    assert work.forward_flops == pytest.approx(whole.forward_flops / 2)


def test_a_device_holds_its_experts_and_all_else(graph: WorkloadGraph) -> None:
    op, split = middle(graph, 2)
    sizes = parameter_sizes(graph.tasks["fill_in"], [op], lambda _: split)
    experts = EXPERTS * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN) * FLOAT
    assert sizes.layer_bytes - sizes.whole_bytes == experts


@pytest.mark.long
def test_an_estimate_says_how_many_experts_there_are(tmp_path: Path) -> None:
    cluster = Cluster.read(CONFIGS / "clusters" / "a800-1x8.yaml")
    nobody = Audience(Console(file=io.StringIO()), lambda _: None)
    source = str(CONFIGS / "workloads" / "bert-moe-laptop.yaml")
    (metaop,) = estimate_profile(source, tmp_path / "profile.json", nobody, cluster=cluster).metaops
    assert metaop.num_experts == EXPERTS
    assert {point.tp for point in metaop.curve} == {1, 2, 4}
    # The first of two pairs hands on its samples: 16 of 16 tokens, and a balance each, in bfloat16.
    handed = {(entry.tp, entry.first_op): entry.joined_bytes for entry in metaop.memory}
    whole = 16 * (16 * WIDTH + 1) * 2
    assert handed == {(1, 0): 0, (1, 1): 0, (2, 0): whole, (2, 1): 0, (4, 0): whole, (4, 1): 0}


def test_numbers_are_compared_with_those_of_two_devices(
    graph: WorkloadGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of other devices' samples that come back to the wrong places are refused."""
    check = CheckSettings(by_words=True)
    assert all(task.checked for task in check_numbers(graph, 0, check).tasks)
    right = Dispatch.to_samples
    monkeypatch.setattr(Dispatch, "to_samples", lambda self, own, **more: right(self, own.flip(1), **more))
    with pytest.raises(WorkloadError, match=r"where 2 devices have a part of its experts each, .* differs"):
        check_numbers(graph, 0, check)
    assert checking._DEVICES == 2
