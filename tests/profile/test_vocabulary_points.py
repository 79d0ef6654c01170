"""Points of a language model whose head and embedding are split by words."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from helpers.analysed import analysed
from spindle_cli.costs.links import all_reduce_s
from spindle_cli.errors import InputError, WorkloadError
from spindle_cli.files.cluster import Cluster
from spindle_cli.operators.heads.chunked import timed_op
from spindle_cli.operators.heads.vocabulary_part import VocabularyPart
from spindle_cli.operators.tensor_parallel import kept_whole, layer_split
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.profile.estimating.estimate import between
from spindle_cli.profile.estimating.fake_memory import fake_memory
from spindle_cli.profile.op.counting import count_work
from spindle_cli.profile.op.split_runs import SumCounter, one_part
from spindle_cli.profile.profiling import Audience, estimate_profile
from spindle_cli.profile.types import Profile
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import Op, TaskGraph, WorkloadGraph
from spindle_cli.workload.types import Task, Workload
from spindle_cli.zoo.layers import TP_PLANS, EncoderLayer

CONFIGS = Path(__file__).parent.parent.parent / "configs"
WIDTH, HEADS, TOKENS, BATCH, WORDS = 16, 4, 8, 4, 1025
PARAMETER = WORDS * WIDTH * 4


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(EncoderLayer(WIDTH, HEADS) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) + self.position.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1]
        return functional.cross_entropy(logits.reshape(-1, WORDS), words[:, 1:].reshape(-1))


def workload(tied: bool = False) -> Workload:
    items = [{"words": torch.arange(TOKENS) + index} for index in range(BATCH)]
    return Workload(
        "write", [Task("task", Model(tied), BATCH, items)], operators=(EncoderLayer,), tp_plans=TP_PLANS
    )


@pytest.fixture(scope="module")
def graph() -> WorkloadGraph:
    return analysed(workload())


@pytest.fixture(scope="module")
def task(graph: WorkloadGraph) -> TaskGraph:
    return graph.tasks["task"]


def a800() -> Cluster:
    """A node of four."""
    whole = Cluster.read(CONFIGS / "clusters" / "a800-1x8.yaml")
    return whole.changed(nodes=(whole.nodes[0].model_copy(update={"devices": 4}),))


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_profile_says_what_of_the_glue_is_split_and_what_the_sums_take(tied: bool, tmp_path: Path) -> None:
    source = tmp_path / "write.py"
    source.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from test_vocabulary_points import workload\n\n\ndef build():\n    return workload({tied})\n"
    )
    nobody = Audience(Console(file=io.StringIO()), lambda _: None)
    made = estimate_profile(f"{source}:build", tmp_path / "p.json", nobody, cluster=a800())
    (metaop,) = made.metaops
    small = {0: TOKENS * WIDTH * 4, 2: 2 * WIDTH * 4}  # the position, the norm
    assert metaop.extra_param_bytes == {op: PARAMETER + num_bytes for op, num_bytes in small.items()}
    assert metaop.split_extra_param_bytes == {0: PARAMETER, 2: PARAMETER}
    points = {(point.dp, point.tp): point for point in metaop.curve}
    assert {(1, 2), (2, 2), (1, 4)} <= points.keys()

    def sum_s(elements: float) -> float:
        return all_reduce_s(elements * 2, range(4), a800())

    hidden, tokens = BATCH * TOKENS * WIDTH, BATCH * (TOKENS - 1)
    layers = 3 * 4 * sum_s(hidden)
    words = sum_s(hidden) + sum_s(tokens) + sum_s(2 * tokens) + sum_s(hidden)
    assert points[1, 4].communication_s == pytest.approx((layers + words) / 3)


def test_a_profile_that_splits_more_of_the_glue_than_there_is_is_refused(tmp_path: Path) -> None:
    made = Profile.model_validate(_little_profile())
    assert made.metaops[0].split_extra_param_bytes == {0: 3}
    out = tmp_path / "p.json"
    wrong = _little_profile()
    wrong["metaops"][0]["split_extra_param_bytes"] = {0: 5}
    out.write_text(json.dumps(wrong))
    with pytest.raises(InputError, match="5 for op 0 is more than the extra_param_bytes of 'a/m', 4"):
        Profile.read(out)


def _little_profile() -> dict[str, Any]:
    return {
        "schema": "spindle.profile/1",
        "workload": {"name": "w", "fingerprint": "sha256:" + "0" * 64, "source": "w.yaml"},
        "device": {"type": "cpu", "name": "cpu", "memory_bytes": 1},
        "metaops": [
            {
                "name": "a/m",
                "task": "a",
                "num_ops": 1,
                "batch_size": 1,
                "extra_param_bytes": {0: 4},
                "split_extra_param_bytes": {0: 3},
                "curve": [{"num_devices": 1, "dp": 1, "forward_s": 1, "backward_s": 1, "source": "measured"}],
            }
        ],
    }


def last(task: TaskGraph) -> Op:
    return task.ops[-1]


def test_a_part_of_the_head_does_its_share_of_the_products(graph: WorkloadGraph, task: TaskGraph) -> None:
    whole = count_work(task, last(task), BATCH, "float32")
    split = layer_split(graph.workload, task, last(task), 2)
    half = count_work(task, last(task), BATCH, "float32", split)
    # One word more than half of them.
    extra = 2 * BATCH * TOKENS * WIDTH * 0.5
    assert half.forward_flops == pytest.approx(whole.forward_flops / 2 + extra)
    assert half.activation_bytes < 0.6 * whole.activation_bytes


def test_work_between_two_shares_has_its_sums_between_theirs(graph: WorkloadGraph, task: TaskGraph) -> None:
    split = layer_split(graph.workload, task, last(task), 2)
    few, middle, many = (count_work(task, last(task), rows, "float32", split) for rows in (2, 3, 4))
    found = between(few, many, 2, 4, 3)
    assert found is not None
    assert found.word_sums == middle.word_sums
    assert middle.word_sums == ((3 * 7 * 4, 2 * 3 * 7 * 4), (3 * TOKENS * WIDTH * 4,))
    whole = count_work(task, task.ops[1], 4, "float32")
    assert between(few, whole, 2, 4, 3) is None


def test_the_memory_of_a_part_is_that_of_its_own_logits(graph: WorkloadGraph, task: TaskGraph) -> None:
    train = TrainSettings(loss_chunks=1)
    split = layer_split(graph.workload, task, last(task), 4)
    whole = fake_memory(task, last(task), BATCH, "float32", train)
    part = fake_memory(task, last(task), BATCH, "float32", train, split)
    logits = BATCH * TOKENS * WORDS * 4
    assert whole.kept_bytes > logits * 0.8
    assert part.kept_bytes < logits * 0.4
    assert part.forward_bytes < 0.5 * whole.forward_bytes


def test_one_part_has_the_most_words_that_a_device_has(graph: WorkloadGraph, task: TaskGraph) -> None:
    sums = SumCounter((0,), 0, torch.device("cpu"))
    split = layer_split(graph.workload, task, last(task), 2)
    assert split is not None
    timed = timed_op(task, last(task), 2, 4, split.vocabulary_shard(sums))
    assert timed.loss_chunks > 1
    part = one_part(timed.module, split, sums)
    hidden = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    fields = [torch.arange(TOKENS).repeat(2, 1) for _ in last(task).fields]
    timed.called(part)(*fields, hidden).backward()
    leaves = {tuple(leaf.shape) for leaf in part.leaves}
    assert (513, WIDTH) in leaves
    assert (WORDS, WIDTH) not in {tuple(p.shape) for p in part.parameters()}
    counted = sums.take()
    chunks, layers = timed.loss_chunks, 2
    assert len(counted.forward) == layers + 2 * chunks
    assert len(counted.backward) == layers + chunks


def test_a_head_that_stays_whole_is_named(graph: WorkloadGraph) -> None:
    assert kept_whole(graph) == ()

    class Other(Model):
        def forward(self, words: Tensor) -> Tensor:
            x = self.layers[0](self.embed(words))
            logits = self.head(x).log_softmax(-1)
            return functional.nll_loss(logits.flatten(0, 1), words.flatten())

    items = [{"words": torch.arange(TOKENS)} for _ in range(BATCH)]
    found = analysed(Workload("w", [Task("task", Other(False), BATCH, items)], operators=(EncoderLayer,)))
    (line,) = kept_whole(found)
    assert line == (
        "tensor parallelism: task: the head head.weight over 1,025 words: "
        "'log_softmax' takes its logits, not word by word; it stays whole"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_what_devices_compute_of_their_words_is_checked_by_numbers(tied: bool) -> None:
    graph = analysed(workload(tied))
    (found,) = check_numbers(graph, 0, CheckSettings(threads=1, by_words=True)).tasks
    assert found.checked == ("task/layers",)
    assert found.largest_difference < 1e-12


@pytest.mark.parametrize(
    ("broken", "instead", "losses_only"),
    [
        ("first", lambda part, words: words * part.group.member // part.degree + 3, True),
        ("enter", lambda part, hidden: hidden, True),
        ("lookup", lambda part, ids, weight, *_: functional.embedding(ids % len(weight), weight), False),
    ],
)
def test_a_split_that_computes_something_else_is_refused(
    broken: str, instead: Any, losses_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = analysed(workload())
    monkeypatch.setattr(VocabularyPart, broken, instead)
    check_numbers(graph, 0, CheckSettings(threads=1, losses_only=losses_only))
    with pytest.raises(WorkloadError, match=r"split by words over 2 devices, .* differs") as refused:
        check_numbers(graph, 0, CheckSettings(threads=1, losses_only=losses_only, by_words=True))
    assert "tp_vocabulary=None" in str(refused.value.hint)
