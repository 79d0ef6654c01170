"""Batch norm over uneven shares of a batch: what the whole gives, forward, backward and in statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.examples import examples
from spindle_cli.operators.batch_dependent import (
    OverShares,
    Statistics,
    find_statistics,
    over_shares,
    update_running,
)
from spindle_cli.operators.tensor_group import TensorGroup
from spindle_cli.profile.checking.in_turn import InTurn
from spindle_cli.runtime.step.recompute import run_recomputed

Make = Callable[[], nn.Module]
KINDS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (3,)),
    "1d of sequences": (lambda: nn.BatchNorm1d(3, momentum=0.3), (3, 5)),
    "2d": (lambda: nn.BatchNorm2d(3, eps=1e-2), (3, 2, 4)),
    "3d": (lambda: nn.BatchNorm3d(3), (3, 2, 2, 2)),
    "sync": (lambda: nn.SyncBatchNorm(3), (3, 4)),
    "mean of all batches": (lambda: nn.BatchNorm1d(3, momentum=None), (3,)),
    "no momentum": (lambda: nn.BatchNorm1d(3, momentum=0.0), (3,)),
    "without parameters": (lambda: nn.BatchNorm1d(3, affine=False), (3,)),
    "without statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (3,)),
    "without statistics, not training": (lambda: nn.BatchNorm1d(3, track_running_stats=False).eval(), (3,)),
    "several": (
        lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3)),
        (3,),
    ),
}


class Alone(TensorGroup):
    """A group of one share, which counts its sums."""

    def __init__(self) -> None:
        super().__init__((0,), 0, torch.device("cpu"))
        self.sums: list[tuple[int, bool]] = []

    def sum_(self, tensor: Tensor, *, is_gradient: bool) -> None:
        self.sums.append((tensor.numel(), is_gradient))


def in_shares(module: nn.Module, x: Tensor, seeds: Tensor, cuts: Sequence[int]) -> dict[str, Tensor]:
    """Outputs, gradients and buffers of a module, of which every share has a copy."""
    group = InTurn(len(cuts) - 1)
    parts = [x[first:last].clone().requires_grad_() for first, last in pairwise(cuts)]
    modules = [copy.deepcopy(module) for _ in parts]
    start = copy.deepcopy(module.state_dict())

    def forward(module: nn.Module, part: Tensor) -> Tensor:
        module.load_state_dict(start)
        return over_shares(module, module, group)(part)

    outputs = group.run([partial(forward, *pair) for pair in zip(modules, parts, strict=True)])

    def backward(output: Tensor, module: nn.Module, part: Tensor, seed: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(output, [part, *module.parameters()], seed, retain_graph=True)

    shares = zip(outputs, modules, parts, [seeds[a:b] for a, b in pairwise(cuts)], strict=True)
    gradients = group.run([partial(backward, *share) for share in shares])
    found = {"output": torch.cat(outputs), "input": torch.cat([each[0] for each in gradients])}
    for position, (name, _) in enumerate(module.named_parameters(), 1):
        found[name] = torch.stack([each[position] for each in gradients]).sum(0)
    for index, each in enumerate(modules):
        found |= {f"{name} of {index}": buffer for name, buffer in each.named_buffers()}
    return found


def whole(module: nn.Module, x: Tensor, seeds: Tensor, shares: int) -> dict[str, Tensor]:
    module, x = copy.deepcopy(module), x.clone().requires_grad_()
    output = module(x)
    gradients = torch.autograd.grad(output, [x, *module.parameters()], seeds)
    names = ["input", *(name for name, _ in module.named_parameters())]
    found = {"output": output, **dict(zip(names, gradients, strict=True))}
    for index in range(shares):
        found |= {f"{name} of {index}": buffer for name, buffer in module.named_buffers()}
    return found


def assert_alike(module: nn.Module, x: Tensor, cuts: Sequence[int], tolerance: float) -> None:
    seeds = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    found, expected = in_shares(module, x, seeds, cuts), whole(module, x, seeds, len(cuts) - 1)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(0, 1, 7), (0, 2, 3, 7)], ids=str)
def test_uneven_shares_give_what_the_whole_gives(kind: str, cuts: tuple[int, ...]) -> None:
    make, shape = KINDS[kind]
    torch.manual_seed(0)
    module = make().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    assert_alike(module, drawn(7, *shape), cuts, 1e-11)


@examples(20)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(1, 3), st.integers(0, 99))
def test_any_shares_of_any_sizes(sizes: list[int], width: int, seed: int) -> None:
    cuts = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    assert_alike(nn.BatchNorm1d(width).double(), drawn(cuts[-1], width, 2, seed=seed), cuts, 1e-9)


def test_statistics_by_hand() -> None:
    """Of 0 alone, and of 2, 4 and 6 elsewhere: a mean of 3 and a variance of 5, as neither has."""
    group = InTurn(2)
    one, three = torch.tensor([[0.0]]), torch.tensor([[2.0], [4.0], [6.0]])
    found = group.run([partial(find_statistics, one, group), partial(find_statistics, three, group)])
    expected = (torch.tensor([3.0]), torch.tensor([5.0]), 4.0)
    assert [tuple(each) for each in found] == [expected, expected]
    norm = nn.BatchNorm1d(1, momentum=0.5)
    update_running(norm, found[0])
    assert norm.running_mean == 1.5
    assert norm.running_var == pytest.approx(0.5 + 0.5 * 5 * 4 / 3)
    assert norm.num_batches_tracked == 1


def test_gradients_by_hand() -> None:
    """x = -1 | 1 and only the first sample's output counts: its own gradient is what normalising leaves of
    it, and the other share gets one although nothing of its own counts.
    """
    module = nn.BatchNorm1d(1, eps=3.0).double()  # 1 / sqrt(1 + 3) = 1 / 2
    x = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    found = in_shares(module, x, torch.tensor([[1.0], [0.0]], dtype=torch.float64), (0, 1, 2))
    assert found["output"].tolist() == [[-0.5], [0.5]]
    # dx_i = (g_i - mean(g) - xhat_i mean(g xhat)) / 2, with xhat = -1/2, 1/2
    assert found["input"].tolist() == [[(1 - 1 / 2 - 1 / 8) / 2], [(0 - 1 / 2 + 1 / 8) / 2]]
    assert (found["weight"].tolist(), found["bias"].tolist()) == ([-0.5], [1.0])


def test_a_small_variance_beside_a_large_mean_is_not_lost_in_float32() -> None:
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)) + 3e3
    group = InTurn(2)
    found = group.run([partial(find_statistics, part, group) for part in (x[:5], x[5:])])[0]
    torch.testing.assert_close(found.variance, x.double().var(0, correction=0).float(), rtol=1e-3, atol=0)


def test_bfloat16_is_computed_in_float32_and_comes_out_as_it_went_in() -> None:
    module = nn.BatchNorm1d(3).to(torch.bfloat16)
    x = drawn(8, 3).to(torch.bfloat16).requires_grad_()
    output = over_shares(module, module, Alone())(x)
    output.sum().backward()
    torch.testing.assert_close(output, copy.deepcopy(module)(x), rtol=2e-2, atol=2e-2)
    assert {t.dtype for t in (output, x.grad, module.weight.grad, module.bias.grad)} == {torch.bfloat16}
    x = drawn(8, 3).requires_grad_()
    assert over_shares(module, nn.BatchNorm1d(3), Alone()) is not module
    with torch.autocast("cpu", torch.bfloat16):
        widened = nn.BatchNorm1d(3)
        assert over_shares(widened, widened, Alone())(x.to(torch.bfloat16)).dtype is torch.bfloat16


def test_one_sum_of_each_direction_and_what_it_carries() -> None:
    """Two numbers for each channel, and forward the count; none backward where no input has a gradient."""
    module, group = nn.BatchNorm2d(3), Alone()
    op = over_shares(module, module, group)
    op(torch.randn(2, 3, 2, 2)).sum().backward()
    assert group.sums == [(7, False)]
    op(torch.randn(2, 3, 2, 2, requires_grad=True)).sum().backward()
    assert group.sums[1:] == [(7, False), (6, True)]


def test_a_recomputed_op_sums_once_and_counts_its_batch_once() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2), nn.BatchNorm1d(2))
    other, groups = copy.deepcopy(module), (Alone(), Alone())
    x = torch.randn(6, 3, requires_grad=True)
    kept = over_shares(module, module, groups[0])(x)
    again = run_recomputed(over_shares(other, other, groups[1]), [x])
    first, second = (
        torch.autograd.grad(output.square().sum(), [x, *each.parameters()])
        for output, each in ((kept, module), (again, other))
    )
    assert groups[0].sums == groups[1].sums == [(9, False), (5, False), (4, True), (8, True)]
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), other.buffers(), strict=True))
    assert module[1].num_batches_tracked == 1


def test_each_remembered_run_has_a_memory_of_its_own() -> None:
    module, group = nn.BatchNorm1d(1), Alone()
    op = over_shares(module, module, group)
    assert isinstance(op, OverShares)
    inputs = [torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [4.0]])]
    runs = [checkpoint(op.remembering(), x.requires_grad_(), use_reentrant=False) for x in inputs]
    for run in reversed(runs):
        run.square().sum().backward()
    assert [size for size, is_gradient in group.sums if not is_gradient] == [3, 3]


def test_a_pass_that_keeps_running_statistics_goes_back_after_shares_have_changed_them() -> None:
    """As where two tasks have one norm, and a device runs all of one batch and a share of the other."""
    norm, one, two = nn.BatchNorm1d(3), torch.randn(4, 3), torch.randn(5, 3)
    plain = copy.deepcopy(norm)
    whole = norm(one.requires_grad_())
    over_shares(norm, norm, Alone())(two)
    (found,) = torch.autograd.grad(whole.square().sum(), one)
    (expected,) = torch.autograd.grad(plain(one).square().sum(), one)
    plain(two)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(norm.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_second_derivative_is_refused() -> None:
    module = nn.BatchNorm1d(3)
    x = torch.randn(4, 3, requires_grad=True)
    output = over_shares(module, module, Alone())(x).square().sum()
    (gradient,) = torch.autograd.grad(output, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_on_one_device_only_what_would_wait_or_sync_is_replaced() -> None:
    plain, sync, counted = nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.BatchNorm1d(2, momentum=None)
    assert over_shares(plain, plain, None) is plain
    for module in (sync, counted):
        other, x = nn.BatchNorm1d(2, momentum=module.momentum), torch.randn(4, 2)
        op = over_shares(module, module, None)
        assert isinstance(op, OverShares)
        torch.testing.assert_close(op(x), other(x))
        torch.testing.assert_close(module.running_var, other.running_var)
    frozen = nn.SyncBatchNorm(2).eval()
    assert over_shares(frozen, frozen, Alone()) is frozen


def test_a_module_is_as_it_was_after_a_run_and_after_a_failed_one() -> None:
    module = nn.BatchNorm1d(2)
    op = over_shares(module, module, Alone())
    op(torch.randn(3, 2))
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        op(torch.randn(3, 2, 1, 1))
    assert "forward" not in module.__dict__


def test_statistics_are_kept_as_plain_pytorch_keeps_them() -> None:
    """Over several batches, with the mean of all of them, and where there is nothing to keep."""
    plain, ours = nn.BatchNorm1d(2, momentum=None).double(), nn.BatchNorm1d(2, momentum=None).double()
    for seed in range(3):
        x = drawn(5, 2, seed=seed)
        plain(x)
        update_running(ours, find_statistics(x, None))
    torch.testing.assert_close(ours.running_mean, plain.running_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours.running_var, plain.running_var, rtol=1e-12, atol=0)
    untracked = nn.BatchNorm1d(2, track_running_stats=False)
    update_running(untracked, Statistics(torch.ones(2), torch.ones(2), torch.tensor(2.0)))
    frozen = nn.BatchNorm1d(2).eval()
    update_running(frozen, Statistics(torch.ones(2), torch.ones(2), torch.tensor(2.0)))
    assert frozen.num_batches_tracked == 0
