"""Offload: the same numbers as where nothing is moved, and nothing of an op stays between its passes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from spindle_cli.costs.beyond_curve import HOST_BLOCK_BYTES
from spindle_cli.runtime.step import offload as subject
from spindle_cli.runtime.step.host_copies import HostMemory, blocks_for, parts_of
from spindle_cli.runtime.step.offload import SliceCopies, storage_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _tiny_tensors_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "LEAST_BYTES", 1)


class Mixed(nn.Module):
    """Saves views, transposes, a tensor twice, masks, what it changes in place, and its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.batch_norm = nn.LayerNorm(6), nn.BatchNorm1d(6)
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mixed = torch.softmax(q @ k.t(), dim=-1) @ v
        y = functional.relu(self.out(mixed).mul_(2.0), inplace=True)
        y = checkpoint(torch.tanh, y, use_reentrant=False)
        y = y * y + torch.complex(y, x).conj().abs()
        return functional.dropout(self.batch_norm(x + y), 0.3)


def train(moved: Sequence[int], steps: int = 2) -> list[Tensor]:
    """Losses, gradients and buffers of four layers, of which these are moved."""
    torch.manual_seed(3)
    layers = nn.ModuleList([Mixed() for _ in range(4)]).double()
    host, found = HostMemory(CPU), []
    for _ in range(steps):
        x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
        copies, y = SliceCopies(host, [x]), x
        for number, layer in enumerate(layers):
            copies.make_room()
            if number in moved:
                with copies.moving(number, [layer]):
                    y = layer(y)
            else:
                y = layer(y)
                if number + 1 in moved:
                    copies.watch([y])
        copies.end_forward()
        copies.begin_backward()
        y.square().sum().backward()
        copies.end_backward()
        found += [y.detach(), x.grad, torch.rand(1)]
    found += [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]
    return [*found, *layers.buffers()]


@pytest.mark.parametrize("moved", [(0,), (3,), (0, 2), (0, 1, 2, 3)])
def test_nothing_but_memory_tells_offload_from_keeping(moved: Sequence[int]) -> None:
    plain = train(())
    for kept, back in zip(plain, train(moved), strict=True):
        assert torch.equal(kept, back)


def run(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[SliceCopies, Tensor]:
    """A slice of one op, without parameters, that is moved."""
    copies = SliceCopies(HostMemory(CPU), [x])
    with copies.moving(0, []):
        y = function(x)
    return copies, y


def test_what_an_op_has_saved_is_gone_until_its_backward_pass_and_the_host_has_it_once() -> None:
    x = torch.randn(40, 30, requires_grad=True)
    between: list[weakref.ref[Tensor]] = []

    def op(x: Tensor) -> Tensor:
        wide = x.repeat(1, 2)
        between.append(weakref.ref(wide.untyped_storage()))
        return (wide.exp() * wide).sum() + (wide.t() @ wide).sum()

    copies, y = run(op, x)
    (saved,) = copies._ops
    gc.collect()
    assert saved._here is None
    # `wide` with its transpose, and its exponential; sums save nothing.
    assert sorted(saved._sizes) == [40 * 60 * 4] * 2
    copies.begin_backward()
    y.backward()
    copies.end_backward()
    expected = torch.autograd.grad(op(x), x)[0]
    assert torch.equal(x.grad, expected)


def test_inputs_and_parameters_stay() -> None:
    layer = nn.Linear(30, 30)
    x = torch.randn(40, 30, requires_grad=True)
    copies = SliceCopies(HostMemory(CPU), [x])
    with copies.moving(0, [layer]):
        y = layer(x.view(30, 40).view(40, 30)) * 1.0
    assert copies._ops[0]._sizes == []
    assert y.requires_grad


def test_what_is_tiny_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "LEAST_BYTES", 256)
    for count, moved in ((64, 1), (63, 0)):
        copies, _ = run(lambda x: (x * 1.0).exp(), torch.randn(count, requires_grad=True))
        assert len(copies._ops[0]._sizes) == moved


@pytest.mark.parametrize("least", [1, 2**20])
def test_a_saved_tensor_that_is_changed_in_place_is_refused_as_plain_torch_does(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def op(x: Tensor) -> Tensor:
        y = x.exp()
        y.mul_(2.0)  # exp has saved its result
        return y.sum()

    x = torch.randn(40, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        op(x).backward()
    monkeypatch.setattr(subject, "LEAST_BYTES", least)
    with pytest.raises(RuntimeError, match="changed in place"):
        run(op, x)[1].backward()


def test_an_op_that_is_needed_again_comes_again() -> None:
    """The gradient of two ops' outputs, the first one's asked for twice."""
    x = torch.randn(20, 20, requires_grad=True)
    copies = SliceCopies(HostMemory(CPU), [x])
    values = [x]
    for number in range(3):
        with copies.moving(number, []):
            values.append((values[-1] * 1.5).tanh())
    plain = x.detach().clone().requires_grad_(True)
    other = plain
    for _ in range(3):
        other = (other * 1.5).tanh()
    copies.begin_backward()
    for _ in range(2):
        found = torch.autograd.grad(values[-1].sum(), x, retain_graph=True)[0]
    copies.end_backward()
    assert torch.equal(found, torch.autograd.grad(other.sum(), plain)[0])


def test_one_op_ahead_is_brought_back_and_what_is_through_goes() -> None:
    x = torch.randn(20, 20, requires_grad=True)
    copies, here = SliceCopies(HostMemory(CPU), [x]), []
    y = x
    for number in range(4):
        with copies.moving(number, []):
            y = (y * 1.5).tanh()
        y.register_hook(lambda _: here.append([op._here is not None for op in copies._ops]))
    assert [op._here for op in copies._ops] == [None] * 4
    copies.begin_backward()
    assert [op._here is not None for op in copies._ops] == [False, False, False, True]
    y.sum().backward()
    # As each op's backward pass begins: its own is on its way since the one behind it began.
    assert here == [
        [False, False, False, True],
        [False, False, True, True],
        [False, True, True, False],
        [True, True, False, False],
    ]
    copies.end_backward()


def test_between_ops_that_stay_one_that_is_through_goes_before_the_next_comes() -> None:
    """The first and the third of four ops are moved; looked at as each of the others runs backward."""
    x = torch.randn(20, 20, requires_grad=True)
    copies, here, y = SliceCopies(HostMemory(CPU), [x]), [], x
    for number in range(4):
        if number % 2 == 0:
            with copies.moving(number, []):
                y = (y * 1.5).tanh()
        else:
            y = (y * 1.5).tanh()
            copies.watch([y] if number == 1 else [])
        y.register_hook(lambda _: here.append([op._here is not None for op in copies._ops]))
    copies.begin_backward()
    y.sum().backward()
    copies.end_backward()
    assert here == [[False, True], [False, True], [True, False], [True, False]]


def test_host_memory_is_used_again() -> None:
    host = HostMemory(CPU)
    for _ in range(3):
        x = torch.randn(20, 20, requires_grad=True)
        copies = SliceCopies(host, [x])
        for number in range(2):
            with copies.moving(number, []):
                y = (x * 1.5).tanh()
        y.sum().backward()
        copies.end_backward()
    assert len(host._free) == 2


def test_bytes_are_cut_at_the_ends_of_blocks() -> None:
    sizes = [HOST_BLOCK_BYTES - 3, 5, 2 * HOST_BLOCK_BYTES, 1]
    here = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    count = blocks_for(sum(sizes))
    assert count == 4
    blocks = [torch.zeros(HOST_BLOCK_BYTES, dtype=torch.uint8) for _ in range(count)]
    assert [len(block) for block, _ in parts_of(blocks, here)] == [
        HOST_BLOCK_BYTES - 3,
        3,
        2,
        HOST_BLOCK_BYTES - 2,
        HOST_BLOCK_BYTES,
        2,
        1,
    ]
    assert blocks_for(HOST_BLOCK_BYTES) == 1
    assert blocks_for(HOST_BLOCK_BYTES + 1) == 2
    assert blocks_for(0) == 0


def test_storages_are_told_apart() -> None:
    one = torch.zeros(4)
    assert storage_of(one) == storage_of(one[2:]) != storage_of(torch.zeros(4))
