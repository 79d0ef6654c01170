"""What mixes samples, or cannot be followed, runs whole, and only as far as it has to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.profiler import record_function

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.profile.checking.forward import compare_with_forward
from spindle_cli.profile.checking.values import Values
from spindle_cli.profile.op.counting import count_work
from spindle_cli.training.batches import Batches
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.types import Task, Workload

from .shares import assert_trains_as_plain
from .toy import WIDTH, Block, Items

BATCH, LENGTH, CLASSES = 6, 5, 4


class Net(nn.Module):
    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run
        self.first, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.a, self.b, self.c = Block(), Block(), Block()

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return self.run(self, x, y, label)


def answers(self: Net, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    rows = self.c(self.b(self.a(self.first(torch.cat([x, y])))))
    better, worse = self.head(rows).sum(-1).chunk(2)
    return -functional.logsigmoid(better - worse).mean()


def answers_apart_early(self: Net, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    better, worse = self.b(self.a(self.first(torch.cat([x, y])))).chunk(2)
    return functional.cross_entropy(self.head(self.c(better - worse)), label)


def answers_by_slices(self: Net, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    n, rows = x.shape[0], self.b(self.a(self.first(torch.cat([x, y]))))
    return functional.cross_entropy(self.head(self.c(rows[:n] - rows[n:])), label)


def answers_side_by_side(self: Net, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    rows = self.c(self.b(self.a(self.first(torch.stack([x, y], 1).flatten(0, 1)))))
    better, worse = self.head(rows).sum(-1).unflatten(0, (-1, 2)).unbind(1)
    return -functional.logsigmoid(better - worse).mean()


def answers_in_one_op(self: Net, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    """What is joined and taken apart in one op is a matter of each share."""
    better, worse = self.b(self.first(torch.cat([x, y]))).chunk(2)
    return functional.cross_entropy(self.head(self.c(self.a(better - worse))), label)


def views(self: Net, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    n, rows = len(x), self.b(self.a(self.first(torch.cat([x, y]))))
    rows = functional.normalize(self.head(rows), dim=-1)
    pairs = (rows @ rows.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return functional.cross_entropy(pairs, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def rolled(self: Net, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    rows = self.a(self.first(x))
    logits = self.head(self.c(self.b(0.7 * rows + 0.3 * rows.roll(1, 0))))
    one, other = (functional.cross_entropy(logits, each) for each in (label, label.roll(1, 0)))
    return 0.7 * one + 0.3 * other


def flipped_first(self: Net, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    rows = self.c(self.b(self.a(self.first(torch.cat([x[:, :1], x.flip(0)[:, 1:]], 1)))))
    return functional.cross_entropy(self.head(rows), label)


def centred(self: Net, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    """The mean goes on to two layers, of which the first makes it."""
    rows = self.a(self.first(x))
    mean = rows.mean(0, keepdim=True)
    return functional.cross_entropy(self.head(self.c(self.b(rows - mean) + mean)), label)


def repeated(self: Net, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    """A list with an entry for each sample, as of latents that all samples share."""
    latent = self.head.weight[:1] * 0.5
    x = self.first(x) + torch.cat([latent] * len(x))
    return functional.cross_entropy(self.head(self.c(self.b(self.a(x)))), label)


def permuted(self: Net, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
    rows, order = self.a(self.first(x)), torch.tensor([2, 0, 1, 5, 4, 3])
    return functional.cross_entropy(self.head(self.c(self.b(rows + rows[order]))), label)


MIXED: dict[Callable[..., Tensor], list[str]] = {
    answers: ["a", "b", "c"],
    answers_apart_early: ["a", "b"],
    answers_by_slices: ["a", "b"],
    answers_side_by_side: [],
    rolled: ["b", "loss"],
    flipped_first: ["a"],
    centred: ["b"],
    repeated: ["a"],
    views: ["a", "b"],
}


def whole_ops(task: TaskGraph) -> list[str]:
    return [op.target or "loss" for op in task.ops if op.coupled]


def check_shares(task: Task, graph: TaskGraph) -> None:
    """Shares of what is split and the rest whole come to the loss and gradients of plain torch."""
    batch = Batches(task, seed=1).rows(0, 0, task.batch_size)
    assert_trains_as_plain(task, graph, batch, [0, 1, 4, task.batch_size])


@pytest.mark.parametrize("run", MIXED, ids=lambda run: run.__name__)
def test_samples_that_are_mixed_are_mixed_on_one_device(run: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    task = Task("t", Net(run), BATCH, Items(x=(3,), y=(3,), label=((), CLASSES)))
    graph = analysed(Workload("w", [task], (Block,))).tasks["t"]
    assert whole_ops(graph) == MIXED[run]
    check_shares(task, graph)


class Named(Block):
    """Has a name in what a profiler shows, as `nn.DataParallel` has."""

    def forward(self, x: Tensor) -> Tensor:
        with record_function("named"):
            return super().forward(x)


def test_a_name_for_the_profiler_is_no_reason_to_run_whole() -> None:
    net = Net(answers_side_by_side)
    net.a, net.b = Named(), nn.DataParallel(net.b)  # type: ignore[assignment]
    task = Task("t", net, BATCH, Items(x=(3,), y=(3,), label=((), CLASSES)))
    graph = analysed(Workload("w", [task], (Block, nn.DataParallel))).tasks["t"]
    assert whole_ops(graph) == []
    check_shares(task, graph)


class Layer(nn.Module):
    """An operator that takes sequences and their lengths; `run`: what it does."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run
        self.lstm, self.linear = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH // 2, bidirectional=True)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("count", torch.zeros(()))
        self.sobol = torch.quasirandom.SobolEngine(1)

    def forward(self, x: Tensor, lengths: Tensor, label: Tensor) -> Any:
        return self.run(self, x, lengths, label)


class Sequences(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.a, self.layer, self.c = Block(), Layer(run), Block()

    def forward(self, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
        made = self.layer(self.a(self.first(x)), lengths, label)
        if made.dim() == 0:
            return made
        made = self.head(self.c(made))
        return functional.cross_entropy(made.mean(1) if made.dim() == 3 else made, label)


def packed(self: Layer, x: Tensor, lengths: Tensor, *, is_sorted: bool = False) -> Any:
    return pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=is_sorted)


def packed_last(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    return self.lstm(packed(self, x, lengths))[1][0][-1]


def packed_to_a_length(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    made, _ = self.lstm(packed(self, x, lengths))
    return pad_packed_sequence(made, batch_first=True, total_length=x.shape[1])[0]


def packed_in_order(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    lengths, order = lengths.sort(descending=True)
    made, _ = self.lstm(packed(self, x[order], lengths, is_sorted=True))
    return pad_packed_sequence(made, batch_first=True, total_length=x.shape[1])[0][order.argsort()]


def by_numpy(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    with torch.no_grad():
        weight = torch.from_numpy(np.exp(-lengths.numpy() / 5.0)).to(x.dtype)
    return self.linear(x) * weight[:, None, None]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def by_own_function(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    made: Tensor = Square.apply(self.linear(x))  # type: ignore[no-untyped-call]
    return made


def focal_inside(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    chances, counts = self.head(x.mean(1)).softmax(-1), (label > 0).sum()
    if counts == 0:
        return 0 * chances.sum()
    right = chances.gather(1, label[:, None])[:, 0]
    return (-((1 - right) ** 2) * right.log() * (label > 0)).sum() / counts


def rows_inside(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    made, mask = x.clone(), label > 1
    made[mask] = self.linear(x[mask])
    return made


def packed_longer(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    """Positions first, and more of them than there are."""
    both = nn.utils.rnn.pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
    made, counts = pad_packed_sequence(
        self.gru(both, x.new_ones(2, len(x), WIDTH // 2))[0], padding_value=0.5, total_length=LENGTH + 2
    )
    return made.transpose(0, 1).tanh() * counts.to(x)[:, None, None]


def packed_by_numbers(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    both = pack_padded_sequence(x, lengths.tolist(), batch_first=True, enforce_sorted=False)
    return self.lstm(both)[1][0][-1]


def packed_entries(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    """A mean over all that is there counts long samples more."""
    return x + self.lstm(packed(self, x, lengths))[0].data.mean()


def on_sparse_rows(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    """A product with a sparse matrix of the parameters' values, which torch has no stand-ins for."""
    return x + torch.sparse.mm(
        self.linear.weight.detach().relu().to_sparse_csr(), x.flatten(0, 1).T
    ).T.view_as(x)


def on_a_sparse_graph(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    """What torch has stand-ins for, which have no memory that others could share."""
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graph = torch.sparse_coo_tensor(edges, torch.ones(3, dtype=x.dtype), (LENGTH, LENGTH))
    return x + torch.stack([torch.sparse.mm(graph, each) for each in self.linear(x).unbind(0)])


def on_nested_rows(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor(list(x.unbind(0)), layout=torch.jagged)
    return x + self.linear(rows).values().view_as(x)


def by_a_sequence_of_its_own(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    return x + self.linear(x) * self.sobol.draw(len(x)).to(x)[:, :, None]


SEEN = [
    packed_by_numbers,
    packed_entries,
    by_numpy,
    by_own_function,
    focal_inside,
    rows_inside,
]


def sequences(run: Callable[..., Any], length: int = LENGTH) -> Task:
    torch.manual_seed(0)
    data = Items(16, x=(length, 3), lengths=((), length), label=((), CLASSES))
    data.data["lengths"] += 1
    data.data["label"] = torch.arange(16) % CLASSES
    return Task("t", Sequences(run), BATCH, data)


@pytest.mark.parametrize("run", SEEN, ids=lambda run: run.__name__)
def test_an_operator_that_cannot_be_followed_runs_whole(run: Callable[..., Tensor]) -> None:
    task = sequences(run)
    graph = analysed(Workload("w", [task], (Block, Layer))).tasks["t"]
    assert whole_ops(graph) == ["layer"]
    reasons = [str(op.coupled_because) for op in graph.ops if op.coupled]
    assert all(
        "it decides by the values of its batch" in why and "test_runs_whole.py" in why for why in reasons
    )
    check_shares(task, graph)
    batch = {
        name: field.double() if field.is_floating_point() else field for name, field in items_of(task).items()
    }
    assert compare_with_forward(graph, batch, Values.of_task(graph, torch.float64)) is None
    work = count_work(graph, next(op for op in graph.ops if op.coupled), BATCH, "float32")
    assert work.forward and work.backward


@pytest.mark.parametrize(
    "run", [on_sparse_rows, on_a_sparse_graph, on_nested_rows], ids=lambda run: run.__name__
)
def test_an_operator_with_tensors_that_have_no_memory_of_their_own(run: Callable[..., Tensor]) -> None:
    task = sequences(run)
    graph = analysed(Workload("w", [task], (Block, Layer))).tasks["t"]
    # Where each sample has a product of its own, the layer is split.
    assert whole_ops(graph) == ([] if run is on_a_sparse_graph else ["layer"])
    check_shares(task, graph)
    work = count_work(graph, next(op for op in graph.ops if op.target == "layer"), BATCH, "float32")
    assert work.forward and work.backward


def test_an_object_of_torchs_that_goes_on_from_call_to_call_is_kept_whole_and_put_back() -> None:
    task = sequences(by_a_sequence_of_its_own)
    graph = analysed(Workload("w", [task], (Block, Layer))).tasks["t"]
    assert whole_ops(graph) == ["layer"]
    assert task.module.layer.sobol.num_generated == 0


def test_a_buffer_without_memory_of_its_own_is_refused() -> None:
    task = sequences(on_a_sparse_graph)
    task.module.layer.register_buffer("graph", torch.eye(LENGTH).to_sparse())
    with pytest.raises(WorkloadError, match=r"'layer\.graph' is of layout torch\.sparse_coo") as caught:
        analysed(Workload("w", [task], (Block, Layer)))
    assert "torch.sparse_coo_tensor(self.indices, self.values, size)" in str(caught.value.hint)


@pytest.mark.parametrize("run", [packed_last, packed_to_a_length, packed_longer])
def test_packed_sequences_with_one_shape_are_split(run: Callable[..., Tensor]) -> None:
    task = sequences(run)
    graph = analysed(Workload("w", [task], (Block, Layer))).tasks["t"]
    assert whole_ops(graph) == []
    assert all(op.sees_gradients for op in graph.ops)
    check_shares(task, graph)
    assert pack_padded_sequence(torch.ones(1, 2, 3), torch.tensor([2]), batch_first=True).data.shape == (2, 3)


@pytest.mark.parametrize(("length", "whole"), [(16, []), (17, ["layer"])])
def test_packed_sequences_of_16_positions_are_the_longest_that_are_split(
    length: int, whole: list[str]
) -> None:
    task = sequences(packed_to_a_length, length)
    graph = analysed(Workload("w", [task], (Block, Layer))).tasks["t"]
    assert whole_ops(graph) == whole
    check_shares(task, graph)


def test_packed_sequences_in_an_order_of_the_users_run_whole() -> None:
    task = sequences(packed_in_order)
    graph = analysed(Workload("w", [task], (Block, Layer))).tasks["t"]
    assert whole_ops(graph) == ["layer"]
    check_shares(task, graph)


def items_of(task: Task) -> dict[str, Tensor]:
    return Batches(task, seed=1).rows(0, 0, BATCH)


def longest(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
    made, _ = self.lstm(packed(self, x, lengths * 0 + label[0] + 1))
    return pad_packed_sequence(made, batch_first=True)[0]


def test_an_operator_whose_shape_differs_takes_what_is_behind_it_along() -> None:
    """Until there is one shape again: the whole of `forward`, here."""
    task = sequences(longest)
    graph = analysed(Workload("w", [task], (Block, Layer))).tasks["t"]
    assert whole_ops(graph) == ["loss"]
    check_shares(task, graph)


class Returns(Sequences):
    forward = lambda self, x, lengths, label: self.layer(x, lengths, label).mean()  # noqa: E731


def test_an_operator_whose_shape_differs_in_code_that_cannot_be_written_anew() -> None:
    task = sequences(longest)
    task.module = Returns(longest)
    task.module.layer.lstm = nn.LSTM(3, WIDTH, batch_first=True)
    with pytest.raises(WorkloadError, match="gives another shape") as caught:
        analysed(Workload("w", [task], (Layer,)))
    assert "total_length" in str(caught.value.hint)


def test_a_number_is_no_result_of_an_operator_that_decides_by_values() -> None:
    def counted(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Any:
        return self.linear(x), int(lengths.max())

    class Counted(Sequences):
        def forward(self, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
            made, most = self.layer(self.a(self.first(x)), lengths, label)
            return functional.cross_entropy(self.head(self.c(made)[:, :most].mean(1)), label)

    task = sequences(counted)
    task.module = Counted(counted)
    graph = analysed(Workload("w", [task], (Block, Layer))).tasks["t"]
    assert whole_ops(graph) == ["loss"]
    check_shares(task, graph)


def test_what_an_operator_was_seen_to_change_is_known() -> None:
    def counting(self: Layer, x: Tensor, lengths: Tensor, label: Tensor) -> Tensor:
        if lengths.max() > 0:
            self.count += 1
        return self.linear(x)

    task = sequences(counting)
    graph = analysed(Workload("w", [task], (Block, Layer))).tasks["t"]
    layer = next(op for op in graph.ops if op.coupled)
    assert layer.changes == ("layer.count",)
    assert graph.root.get_buffer("layer.count").item() == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("is_operator", [False, True])
def test_a_module_that_torch_jit_has_compiled(is_operator: bool) -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            if bool(x.sum() > 0):
                return self.linear(x)
            return self.linear(x) + x

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.jit.script(Decides())

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.inner(x)
            return made

    def run(self: Net, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.c(self.holder(self.a(self.first(x))))), label)

    torch.manual_seed(0)
    task = Task("t", Net(run), BATCH, Items(x=(3,), y=(3,), label=((), CLASSES)))
    task.module.holder = Holder()
    operators = (Block, Holder) if is_operator else (Block,)
    graph = analysed(Workload("w", [task], operators)).tasks["t"]
    assert whole_ops(graph) == (["holder"] if is_operator else ["c"])
    check_shares(task, graph)
    assert task.module.holder.inner.linear.weight.grad is not None


def test_what_a_whole_op_hands_on_is_told_where_it_fails() -> None:
    graph = analysed(Workload("w", [sequences(by_numpy)], (Block, Layer))).tasks["t"]
    layer = next(op for op in graph.ops if op.coupled)
    batch = items_of(sequences(by_numpy))
    given = {**batch, layer.inputs[0]: torch.randn(BATCH, LENGTH, WIDTH)}
    (made,) = graph.op_module(layer)(*(given[name] for name in (*layer.fields, *layer.inputs)))
    assert made.shape == (BATCH, LENGTH, WIDTH)


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.history = Block(), list[float]()


class Weighed(Keeping):
    """Weighs its loss by those of the forwards before, which are kept in a list of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        loss = self.first(x).square().mean()
        weight = 1.0 if len(self.history) < 2 else self.history[-1] / self.history[-2]
        if loss > 0:
            self.history.append(loss.item())
        return loss * weight


class WeighedByMethod(Keeping):
    """Reads them in a method."""

    def rate(self) -> float:
        return 1.0 if len(self.history) < 2 else self.history[-1] / self.history[-2]

    def forward(self, x: Tensor) -> Tensor:
        loss = self.first(x).square().mean() * self.rate()
        if loss > 0:
            self.history.append(loss.item())
        return loss


class Logged(Keeping):
    """Keeps what it never reads."""

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.first(x).square().mean()
        if loss > 0:
            self.history.append(loss.item())
        return loss


def weighed(net: nn.Module) -> TaskGraph:
    return analysed(Workload("w", [Task("t", net, 6, Items(x=(WIDTH,)))], (Block,))).tasks["t"]


def test_numbers_that_are_kept_by_their_values_and_read_again_are_in_one_part() -> None:
    """Where both are in one function, what reads them runs whole beside what keeps them."""
    graph = weighed(Weighed())
    assert graph.ops[-1].kept == ("history",)
    root, loss = graph.root, graph.op_module(graph.ops[-1])
    assert root.history == []
    given = torch.rand(6, WIDTH)
    one, two = root.first(given).detach(), root.first(2 * given).detach()
    values = [float(loss(each)) for each in (one, two, one)]
    assert values[0] != pytest.approx(values[1], rel=0.01)
    assert values[2] == pytest.approx(values[1], rel=1e-6), "the loss of `one`, times two's by one's"


def test_numbers_that_are_kept_by_their_values_and_read_in_another_function_are_refused() -> None:
    with pytest.raises(WorkloadError, match=r"forward keeps self\.history for the next one") as raised:
        weighed(WeighedByMethod())
    assert "test_runs_whole.py:" in raised.value.message
    assert "list its class in the workload's `operators`" in str(raised.value.hint)


def test_numbers_that_nobody_reads_may_be_kept() -> None:
    assert [op.kept for op in weighed(Logged()).ops] == [()]
