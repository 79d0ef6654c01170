"""A vocabulary that the devices of a group share out gives the loss and the gradients of the whole one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import head_toys
import pytest
import torch
from head_toys import BATCH, TOKENS, WIDTH, WORDS, Layer, Texts, Writer, batch_of, task_of
from test_loss_chunks import EXACT, SHARE, arguments_of, passed, same
from torch import Tensor, nn
from torch.nn import functional

from helpers.analysed import analysed
from helpers.thread_groups import Meeting, in_threads
from spindle_cli.operators.heads.chunked import loss_in_chunks
from spindle_cli.operators.heads.vocabulary import (
    VocabularySplit,
    find_vocabulary_split,
    values_of,
    with_edits,
)
from spindle_cli.operators.heads.vocabulary_part import VocabularyPart
from spindle_cli.operators.split_op import PartialOp, View
from spindle_cli.operators.tensor_parallel import LayerSplit, layer_split
from spindle_cli.profile.op.split_runs import SumCounter
from spindle_cli.workload.file import LossChunks
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Task, Workload

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
# What is drawn is seen by the seed of the process's one generator: devices are processes, and analyse alone.
_ONE_ANALYSIS = threading.Lock()
LOSSES: tuple[str, ...] = (
    *("causal", "smoothed", "weighted", "shifted", "rooted", "turned", "last_alone", "twice", "two_results"),
)


def split_of(task: TaskGraph, op: int, degree: int) -> LayerSplit:
    found = layer_split(Workload("w", [], tp_vocabulary=2), task, task.ops[op], degree)
    assert found is not None
    return found


def part_of(
    task: TaskGraph, split: LayerSplit, group: Any, setting: LossChunks = 1, op: int = -1
) -> nn.Module:
    """One device's part of an op, with leaves of its own (uneven where the words are)."""
    own_task = copy.deepcopy(task)  # names of the same modules, other objects
    found = loss_in_chunks(own_task, own_task.ops[op], SHARE, setting, split.vocabulary_shard(group))
    views: dict[str, View] = {}
    known: dict[int, View] = {}
    for name, whole in found.module.named_parameters(remove_duplicate=False):
        if name in split.dims:
            if id(whole) not in known:
                known[id(whole)] = View((nn.Parameter(cut_for(whole, group, split.degree)),))
            views[name] = known[id(whole)]
    return PartialOp(found.module, views, None)


def cut_for(whole: Tensor, group: Any, degree: int) -> Tensor:
    first, last = (len(whole) * (group.member + i) // degree for i in (0, 1))
    return whole.detach()[first:last].clone()


@dataclass
class Joined:
    """What the devices found: the first one's, and the parts of what is cut put together."""

    found: dict[str, Tensor]
    meeting: Meeting


def run_parts(
    task: TaskGraph, degree: int, setting: LossChunks = 1, dtype: torch.dtype = torch.float64
) -> Joined:
    """A pass of the loss op on all devices."""
    split = split_of(task, -1, degree)

    def one(group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        with _ONE_ANALYSIS:
            module = part_of(task, split, group, setting)
        arguments = arguments_of(task, dtype)
        found = passed(module, module, arguments)
        views = {name: view.leaves[0].grad for name, view in module._views.items()}
        return found, views

    results, meeting = in_threads(degree, one)
    first = results[0][0]
    for found, _ in results[1:]:
        assert same(
            {"loss": found["loss"], "hidden": found["hidden"]},
            {k: first[k] for k in ("loss", "hidden")},
            EXACT,
        )
    joined = {
        name.removeprefix("op."): tensor
        for name, tensor in first.items()
        if tensor is not None and not name.startswith("leaves.")
    }
    for name in results[0][1]:
        joined[name] = torch.cat([views[name] for _, views in results])
    return Joined(joined, meeting)


@pytest.mark.parametrize("name", LOSSES)
def test_a_head_in_parts_has_the_loss_and_the_gradients_of_the_whole(name: str) -> None:
    """41 words are cut unevenly by each of these degrees."""
    task = task_of(getattr(head_toys, name), bias=name == "smoothed")
    task.root.double()
    whole = task.share_module(task.ops[-1])
    expected = passed(whole, whole, arguments_of(task))
    for degree in (2, 3, 4):
        assert same_named(run_parts(task, degree).found, expected), degree


def same_named(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    names = expected.keys() & found.keys()
    assert {"loss", "hidden"} < names and names >= {n for n in expected if "head" in n}
    return same({name: found[name] for name in names}, {name: expected[name] for name in names}, EXACT)


@pytest.mark.parametrize("name", ["causal", "smoothed", "weighted", "shifted"])
def test_in_chunks_as_well(name: str) -> None:
    task = task_of(getattr(head_toys, name))
    task.root.double()
    whole = task.share_module(task.ops[-1])
    expected = passed(whole, whole, arguments_of(task))
    for setting in (2, 5, 1000):
        assert same_named(run_parts(task, 2, setting).found, expected), setting


class Padded(Writer):
    """Its embedding has a padding word, the one behind the first half."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)


PADDING = WORDS // 2


def tokens_of(word: int) -> Tensor:
    tokens = batch_of()["tokens"][:SHARE]
    tokens[0, 0] = word
    return tokens


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("degree", [2, 3])
def test_an_embedding_in_parts_gives_the_rows_and_the_gradients_of_the_whole(
    degree: int, padding: bool
) -> None:
    task = task_with(Padded(head_toys.causal) if padding else Writer(head_toys.causal))
    task.root.double()
    module, tokens = task.share_module(task.ops[0]), tokens_of(PADDING)
    (expected,) = module(tokens)
    seed = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=expected.dtype)
    expected.backward(seed)
    split = split_of(task, 0, degree)
    assert "embed.weight" in split.words

    def one(group: Any) -> tuple[Tensor, Tensor]:
        part = part_of(task, split, group, op=0)
        (out,) = part(tokens)
        out.backward(seed)
        return out.detach(), part._views["embed.weight"].leaves[0].grad

    results, meeting = in_threads(degree, one)
    assert all(torch.equal(out, results[0][0]) for out, _ in results)
    torch.testing.assert_close(results[0][0], expected.detach(), rtol=EXACT, atol=EXACT)
    found = torch.cat([gradient for _, gradient in results])
    torch.testing.assert_close(found, task.root.embed.weight.grad, rtol=EXACT, atol=EXACT)
    assert meeting.sums == [("forward", (SHARE, TOKENS, WIDTH))]


def task_with(model: nn.Module) -> TaskGraph:
    task = Task("write", model, BATCH, Texts())
    return analysed(Workload(name="heads", tasks=[task], operators=(Layer,))).tasks["write"]


def test_no_device_sees_more_than_its_words_and_three_numbers_for_each_token_move() -> None:
    task = task_of(head_toys.causal)
    task.root.double()
    meeting = run_parts(task, 2).meeting
    tokens = SHARE * TOKENS
    assert meeting.sums == [
        ("max", (tokens,)),
        ("forward", (2, tokens)),
        ("backward", (SHARE, TOKENS, WIDTH)),
    ]


def alone(member: int = 0, degree: int = 2) -> VocabularyPart:
    return VocabularyPart(degree, SumCounter(tuple(range(degree)), member, torch.device("cpu")))


@pytest.mark.parametrize(("member", "first"), [(0, 0), (1, 13), (2, 27)])
def test_a_part_begins_where_the_one_before_ends(member: int, first: int) -> None:
    assert alone(member, 3).first(WORDS) == first


@pytest.mark.parametrize("word", [WORDS, -1, -99])
def test_a_label_or_an_id_that_is_no_word_is_refused(word: int) -> None:
    """Not one of any device's words, it would count as a word without a logit."""
    logits = torch.zeros(2, WORDS // 2)
    with pytest.raises(RuntimeError, match="none of the head's words"):
        alone().cross_entropy(logits, torch.tensor([0, word]), WORDS, -100, 0.0, "sum")
    with pytest.raises(RuntimeError, match="none of its words"):
        alone().lookup(torch.tensor([0, word]), logits.T[: WORDS // 2], WORDS, None)


def test_labels_that_are_all_ignored_give_zeros_without_a_gradient() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    loss = alone().cross_entropy(logits, torch.tensor([7, 7]), 6, 7, 0.0, "sum")
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


def test_under_autocast_the_loss_is_computed_in_float32_as_torchs_own() -> None:
    logits, labels = torch.randn(4, 6).bfloat16(), torch.tensor([0, 5, 2, 3])
    with torch.autocast("cpu", torch.bfloat16):
        expected = functional.cross_entropy(logits, labels)
        found = alone(degree=1).cross_entropy(logits, labels, 6, -100, 0.0, "mean")
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    rounded = alone(degree=1).cross_entropy(logits, labels, 6, -100, 0.0, "mean")
    assert rounded.dtype == torch.bfloat16


def scaled(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Logits are capped and scaled by a parameter, whose gradient each device has a part of."""
    logits = (model.head(x.flatten(0, 1)) / 3.0).tanh() * model.norm.bias.sum()
    return functional.cross_entropy(logits.float().contiguous(), labels.reshape(-1))


def test_a_scale_of_the_logits_has_its_whole_gradient() -> None:
    torch.manual_seed(0)
    model = Writer(scaled)
    nn.init.normal_(model.norm.bias)
    task = task_with(model)
    whole = task.share_module(task.ops[-1])
    expected = passed(whole, whole, arguments_of(task, torch.float32))
    found = run_parts(task, 3, dtype=torch.float32).found
    assert same({"norm.bias": found["norm.bias"]}, {"norm.bias": expected["norm.bias"]}, 1e-5)


def summed(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return (model.head(x).logsumexp(-1) - labels).square().mean()


def of_classes(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return model.weighted(model.head(x).flatten(0, 1), labels.flatten())


def by_nll(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return functional.nll_loss(model.head(x).log_softmax(-1).flatten(0, 1), labels.flatten())


def biased(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x) + model.embed.weight.mean(1)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_pairs(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Two tokens' logits are put side by side."""
    return functional.cross_entropy(model.head(x[:, :6]).reshape(-1, 2 * WORDS), labels[:, :3].flatten())


def flattened(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """A sample's words and positions are one dimension, by default up to the last."""
    return functional.cross_entropy(model.head(x[:, :1]).flatten(1), labels[:, 0])


def some_words(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(
        model.head(x)[..., : WORDS // 2].flatten(0, 1), labels.flatten().clamp(max=3)
    )


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (flattened, "puts its words together with rows"),
        (some_words, "picks of its logits, not by whole rows"),
        (head_toys.squared, "'sub' joins its logits with something"),
        (summed, "its logits go into no cross entropy"),
        (head_toys.running, "'cumsum' takes its logits"),
        (head_toys.dropped, "'dropout' takes its logits"),
        (of_classes, "weights of classes"),
        (by_nll, "'log_softmax' takes its logits"),
        (biased, "of another shape"),
        (of_pairs, "takes its words apart or puts them together"),
    ],
)
def test_what_looks_at_several_words_keeps_the_head_whole_and_says_so(loss: Loss, why: str) -> None:
    model = Writer(loss)
    model.weighted = nn.CrossEntropyLoss(weight=torch.ones(WORDS))
    task = task_with(model)
    found = find_vocabulary_split(task, task.ops[-1], 2)
    assert not found.names
    (said,) = found.why_not
    assert said.startswith(f"head.weight over {WORDS} words: ")
    assert why in said
    assert not find_vocabulary_split(task, task.ops[0], 2).names


def test_small_heads_stay_whole_and_no_device_is_left_without_a_word() -> None:
    task = task_of(head_toys.causal)
    assert find_vocabulary_split(task, task.ops[-1], WORDS).names == {"embed.weight", "head.weight"}
    assert find_vocabulary_split(task, task.ops[-1], WORDS + 1) == VocabularySplit()
    words = Workload("w", [], tp_vocabulary=2)
    assert layer_split(words, task, task.ops[-1], WORDS) is not None
    assert layer_split(words, task, task.ops[-1], WORDS + 1) is None
    none = Workload("w", [], tp_vocabulary=None)
    assert layer_split(none, task, task.ops[-1], 2) is None


def test_a_weight_that_the_op_also_uses_otherwise_stays_whole() -> None:
    def regular(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return head_toys.causal(model, x, labels) + model.embed.weight.square().sum() * 1e-3

    task = task_of(regular)
    assert not find_vocabulary_split(task, task.ops[-1], 2).names


def test_an_evaluation_that_wants_the_logits_gathers_them() -> None:
    task = task_of(head_toys.running)  # as a graph whose logits are used as a whole
    task.root.double()
    module = task.share_module(task.ops[-1])
    with torch.no_grad():
        expected = module(*arguments_of(task))
    names = frozenset({"head.weight", "embed.weight"})
    split = LayerSplit(3, dict.fromkeys(names, 0), (), (), words=names)

    def one(group: Any) -> Tensor:
        own_task = copy.deepcopy(task)
        own = own_task.share_module(own_task.ops[-1])
        words = split.vocabulary_shard(group)
        made = with_edits(own, words.edits(own, values_of(task, task.ops[-1], own, SHARE), gathers=True))
        view = View((nn.Parameter(cut_for(own_task.root.head.weight, group, 3)),))
        with torch.no_grad():
            return PartialOp(made, {"head.weight": view}, None)(*arguments_of(task))

    for found in in_threads(3, one)[0]:
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def test_a_mean_is_over_the_labels_that_count() -> None:
    logits, labels = torch.randn(3, 6), torch.tensor([4, -1, 0])
    found = alone(degree=1).cross_entropy(logits, labels, 6, -1, 0.1, "mean")
    expected = functional.cross_entropy(logits, labels, ignore_index=-1, label_smoothing=0.1)
    torch.testing.assert_close(found, expected)
