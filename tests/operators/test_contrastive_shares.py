"""Rows gathered from all shares and gradients handed back, by hand; and what a second forward pass takes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import InputError, PeerLostError
from spindle_cli.operators import tensor_group
from spindle_cli.operators.batch_dependent import PairsOverShares, ShareRows, gather_rows, pairs_over_shares
from spindle_cli.operators.tensor_group import TensorGroup
from spindle_cli.profile.checking.in_turn import InTurn
from spindle_cli.profile.op.split_runs import SumCounter
from spindle_cli.runtime.part.local_ops import _UnplannedGroup
from spindle_cli.runtime.step.recompute import run_recomputed
from spindle_cli.workload.types import Task, Workload

# A pass of `InTurn` is run again up to each sum.
grad = partial(torch.autograd.grad, retain_graph=True)
CPU = torch.device("cpu")
# Shares go in the order of a slice's devices: 3, 0, 2; communicators in that of their ranks: 0, 2, 3.
RANKS, PER_SHARE = (3, 0, 2), (2, 1, 1)
ROWS = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]]), torch.tensor([[4.0]])]


def member(share: int) -> TensorGroup:
    group = TensorGroup(RANKS, share, CPU)
    group.join(object())  # type: ignore[arg-type]
    return group


def test_rows_of_uneven_shares_are_gathered_in_the_order_of_the_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_gather(every: Tensor, own: Tensor, group: object) -> None:
        assert own.shape == (2, 1), "all bring as many rows"
        every.copy_(torch.tensor([[3.0], [0.0], [4.0], [0.0], [1.0], [2.0]]))  # of ranks 0, 2, 3

    monkeypatch.setattr(tensor_group, "_all_gather", all_gather)
    for share, own in enumerate(ROWS):
        assert member(share).gather(own, PER_SHARE).tolist() == [[1], [2], [3], [4]]


def test_rows_of_uneven_shares_of_ascending_ranks_have_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of one row and two: what fills the first one up is left out, forward and back."""
    sent: list[Tensor] = []
    filled_up, group = torch.tensor([[1.0], [0.0], [2.0], [3.0]]), TensorGroup((0, 1), 0, CPU)
    monkeypatch.setattr(tensor_group, "_all_gather", lambda every, own, group: every.copy_(filled_up))
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(tensor_group, "_reduce_scatter", lambda own, laid, group: sent.append(laid))
    group.join(object())  # type: ignore[arg-type]
    assert group.gather(torch.tensor([[1.0]]), (1, 2)).tolist() == [[1], [2], [3]]
    assert len(group.scatter_sum(torch.tensor([[1.0], [2.0], [3.0]]), (1, 2))) == 1
    assert sent[0].tolist() == filled_up.tolist()


def test_even_shares_go_in_the_order_of_the_shares_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has the first share."""
    sent: list[Tensor] = []
    of_ranks, group = torch.tensor([[5.0], [6.0]]), TensorGroup((1, 0), 0, CPU)
    monkeypatch.setattr(tensor_group, "_all_gather", lambda every, own, group: every.copy_(of_ranks))
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(tensor_group, "_reduce_scatter", lambda own, laid, group: sent.append(laid))
    group.join(object())  # type: ignore[arg-type]
    assert group.gather(torch.tensor([[6.0]]), (1, 1)).tolist() == [[6], [5]]
    group.scatter_sum(torch.tensor([[6.0], [5.0]]), (1, 1))
    assert sent[0].tolist() == of_ranks.tolist()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_every_share_gets_the_sum_of_its_own_rows(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share k brings 10 ** k times the rows 1, 2, 3, 4."""
    sent = [torch.arange(1.0, 5).view(4, 1) * 10**share for share in range(3)]
    laid: dict[int, Tensor] = {}

    def keep(_: Tensor, given: Tensor, group: object) -> None:
        laid[len(laid)] = given.clone()

    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    monkeypatch.setattr(dist, "all_to_all_single", keep)
    monkeypatch.setattr(tensor_group, "_reduce_scatter", keep)
    for share in range(3):
        member(share).scatter_sum(sent[share], PER_SHARE)

    def exchange(parts: Tensor, _: Tensor, group: object) -> None:
        place = sorted(RANKS).index(RANKS[receiver])
        order = [RANKS.index(rank) for rank in sorted(RANKS)]
        found = torch.stack([laid[share].view(3, 2, 1)[place] for share in order])
        parts.copy_(found.view(6, 1) if backend == "gloo" else found.sum(0))

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    monkeypatch.setattr(tensor_group, "_reduce_scatter", exchange)
    found = []
    for receiver in range(3):
        found.append(member(receiver).scatter_sum(sent[receiver], PER_SHARE).flatten().tolist())
    assert found == [[111, 222], [333], [444]]


def test_a_lost_peer_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(tensor_group, "_all_gather", fails)
    with pytest.raises(PeerLostError, match="closed by peer"):
        member(0).gather(ROWS[0], PER_SHARE)


def test_gathered_rows_and_their_gradients_by_hand() -> None:
    """Shares weigh the columns 1 and 2, 3, 4 by 1 and by 10; the gradient of each is 11 times its weight."""
    group = InTurn(2)
    own = [torch.tensor([[1.0]], requires_grad=True), torch.tensor([[2.0, 3.0]], requires_grad=True)]

    def forward(share: int) -> Tensor:
        every = gather_rows(own[share], 1, ShareRows(group, (0, 1, 3)))
        assert every.tolist() == [[1, 2, 3]]
        return (every * torch.tensor([1.0, 3.0, 4.0])).sum() * (1, 10)[share]

    losses = group.run([partial(forward, share) for share in range(2)])
    found = group.run([partial(grad, loss, [leaf]) for loss, leaf in zip(losses, own, strict=True)])
    assert [each[0].tolist() for each in found] == [[[11]], [[33, 44]]]


class Squares(nn.Module):
    """The mean over all pairs of the squared product."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.one(x) @ self.two(x).T).square().mean()


def shares_of(group: TensorGroup, cuts: tuple[int, ...]) -> nn.Module:
    items = [{"x": torch.randn(1)} for _ in range(6)]
    workload = Workload("w", [Task("t", Squares(), cuts[-1], items)], operators=(nn.Linear,))
    task = analysed(workload).tasks["t"]
    op = task.ops[-1]
    assert op.contrasts and len(op.inputs) == 2
    return pairs_over_shares(task.share_module(op), task, op, group, cuts)


def test_a_loss_of_three_samples_on_two_devices_by_hand() -> None:
    """Of 1, 2, 3 and 1, 1, 2 the products are 1 1 2, 2 2 4, 3 3 6: their squares add up to 6 in the first
    row, to 78 below.
    d/da_i = 2 a_i (1 + 1 + 4) / 9, d/db_j = 2 b_j (1 + 4 + 9) / 9.
    """
    group = InTurn(2)
    module = shares_of(group, (0, 1, 3))
    a = [torch.tensor([[1.0]], requires_grad=True), torch.tensor([[2.0], [3.0]], requires_grad=True)]
    b = [torch.tensor([[1.0]]), torch.tensor([[1.0], [2.0]])]
    columns = [each.T.clone().requires_grad_() for each in b]
    parts = group.run([partial(module, a[k], columns[k], (1 / 3, 2 / 3)[k]) for k in range(2)])
    assert [part.item() for part in parts] == pytest.approx([6 / 9, 78 / 9])
    found = group.run(
        [partial(grad, parts[k], [a[k], columns[k]]) for k in range(2)],
    )
    assert torch.cat([each[0] for each in found]).flatten().tolist() == pytest.approx(
        [12 / 9, 24 / 9, 36 / 9]
    )
    assert torch.cat([each[1] for each in found], 1).flatten().tolist() == pytest.approx(
        [28 / 9, 28 / 9, 56 / 9]
    )


def test_a_part_of_two_batches_of_a_step_is_half_as_large() -> None:
    group = InTurn(2)
    module = shares_of(group, (0, 1, 3))
    a, b = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0, 1.0, 2.0]])
    parts = group.run([partial(module, a[:1], b[:, :1], 1 / 6), partial(module, a[1:], b[:, 1:], 2 / 6)])
    assert [part.item() for part in parts] == pytest.approx([3 / 9, 39 / 9])


class Channels(nn.Module):
    """An encoder whose features lie in another order than their dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x).transpose(1, 2)


class Merging(nn.Module):
    """A loss that merges the dimensions of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x).view(len(x), -1)
        return (y @ y.T).square().mean()


def test_features_may_lie_in_any_order() -> None:
    """A linear layer takes a view of features that lie in order, and was recorded on these."""
    torch.manual_seed(0)
    whole, net = torch.randn(3, 2, 4, dtype=torch.float64), nn.Sequential(Channels(), Merging()).double()
    items = [{"input": row} for row in whole]
    task = analysed(Workload("w", [Task("t", net, 3, items)], operators=(Channels, Merging))).tasks["t"]
    op = task.ops[-1]
    assert op.contrasts and len(op.inputs) == 1
    group = InTurn(2)
    module = pairs_over_shares(task.share_module(op), task, op, group, (0, 1, 3))
    features = [net[0](whole[first:last]).requires_grad_() for first, last in ((0, 1), (1, 3))]
    parts = group.run([partial(module, features[k], (1 / 3, 2 / 3)[k]) for k in range(2)])
    assert (parts[0] + parts[1]).item() == pytest.approx(net(whole).item())


def test_a_second_forward_pass_gathers_nothing_again() -> None:
    """What a share gathers is counted: once forward, and its gradient once backward."""
    counter = SumCounter((0,), 0, CPU)
    module = shares_of(counter, (0, 3, 6))
    assert isinstance(module, PairsOverShares)
    a, b = torch.randn(3, 1, requires_grad=True), torch.randn(1, 3, requires_grad=True)
    expected = torch.autograd.grad(module(a, b, 0.5), [a, b])
    plain = counter.take()
    again = torch.autograd.grad(run_recomputed(module, (a, b, 0.5)), [a, b])
    assert (plain.gathers, plain.scatters) == ((24,), (24,))
    assert (counter.take().gathers, counter.take().scatters) == ((24, 24), (24, 24))
    for one, other in zip(again, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_is_as_it_was_where_the_loss_is_run() -> None:
    """Under it the product is in bfloat16, as plain PyTorch has it; without it in float32."""
    group = InTurn(1)
    module = shares_of(group, (0, 3))
    a, b = torch.tensor([[1.0], [2.0], [3.0]]) / 3, torch.tensor([[1.0, 1.0, 2.0]]) / 3
    (plain,) = group.run([partial(module, a, b, 1.0)])
    with torch.autocast("cpu", torch.bfloat16):
        (cast,) = group.run([partial(module, a, b, 1.0)])
        expected = (a @ b).square().mean()
    assert plain.item() == pytest.approx((a @ b).square().mean().item())
    assert cast.item() == expected.item() != plain.item()


def test_a_plan_that_says_nothing_of_gathers_is_refused() -> None:
    group = _UnplannedGroup((0, 1), 0, CPU, label="t/loss[0:1]")
    with pytest.raises(InputError, match=r"t/loss\[0:1\]: its loss compares 6 samples of all its devices"):
        shares_of(group, (0, 3, 6))(torch.randn(3, 1), torch.randn(1, 3), 0.5)
