"""Hooks on what autograd saves are stepped over by torch.func, which refuses those of others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from spindle_cli.analysis.autograd import SavedTensorsHooks, saved_behind
from spindle_cli.profile.op.op_run import OpRun, WallClock


def slopes(x: Tensor) -> Tensor:
    return vmap(grad(lambda row: torch.tanh(row).sum()))(x)


def same(tensor: Tensor) -> Tensor:
    return tensor


def test_torch_func_runs_inside_as_outside() -> None:
    x = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    slopes(x).sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    packed: list[Tensor] = []
    before = torch.autograd.graph.disable_saved_tensors_hooks
    with SavedTensorsHooks(packed.append, same) as outer, SavedTensorsHooks(same, same) as inner:
        found = slopes(x)
    assert torch.autograd.graph.disable_saved_tensors_hooks is before
    found.sum().backward()
    assert torch.equal(x.grad, expected)
    assert outer.stepped_over and inner.stepped_over and not packed


def test_hooks_see_again_what_is_saved_behind_a_transformation() -> None:
    x = torch.ones(3, requires_grad=True)
    packed: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with SavedTensorsHooks(note, same):
        slopes(x.reshape(1, 3))
        seen = len(packed)
        x.exp()
    assert len(packed) == seen + 1
    with torch.autograd.graph.saved_tensors_hooks(note, same):
        x.exp()  # and those of others are none of theirs
    assert len(packed) == seen + 2


def test_hooks_are_back_in_their_order() -> None:
    x = torch.ones(1, 3, requires_grad=True)
    packing: list[str] = []

    def noting(name: str) -> Callable[[Tensor], Tensor]:
        def note(tensor: Tensor) -> Tensor:
            packing.append(name)
            return tensor

        return note

    with SavedTensorsHooks(noting("outer"), same), SavedTensorsHooks(noting("inner"), same):
        slopes(x)
        packing.clear()
        x.exp()
    assert packing == ["inner"]


def test_hooks_of_the_users_own_are_refused_as_in_plain_pytorch() -> None:
    x = torch.ones(1, 3, requires_grad=True)
    with (
        SavedTensorsHooks(same, same),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, same),
        pytest.raises(RuntimeError, match="saved tensor hooks"),
    ):
        slopes(x)
    assert torch.allclose(slopes(x), 1 - torch.tanh(torch.ones(1, 3)) ** 2)


def test_threads_may_end_in_any_order() -> None:
    """Two threads whose contexts overlap, neither inside the other, leave torch as it was."""
    x = torch.ones(1, 3, requires_grad=True)
    before = torch.autograd.graph.disable_saved_tensors_hooks
    is_set, may_end = threading.Event(), threading.Event()

    def overlap() -> None:
        with SavedTensorsHooks(same, same):
            is_set.set()
            may_end.wait()
            slopes(x)

    thread = threading.Thread(target=overlap)
    with SavedTensorsHooks(same, same) as hooks:
        thread.start()
        is_set.wait()
    assert not hooks.stepped_over
    slopes(x)
    may_end.set()
    thread.join()
    assert not hooks.stepped_over
    assert torch.autograd.graph.disable_saved_tensors_hooks is before


class Slopes(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return slopes(x)


def test_what_a_transformation_saves_counts_as_kept() -> None:
    """In float32: the result of tanh, 4 x 3; what went into its derivative, the gradient of a row's sum,
    one number a row, expanded; and the result.
    """
    x = torch.ones(4, 3, requires_grad=True)
    assert OpRun(Slopes(), (x,), 0, WallClock()).kept_bytes() == 4 * (12 + 4 + 12)


def test_tensors_that_are_saved_together_are_found() -> None:
    x, rows = torch.ones(4, 3, requires_grad=True), torch.tensor([0, 2])
    assert any(tensor.data_ptr() == rows.data_ptr() for tensor in saved_behind((x.exp()[rows].neg(),)))


@pytest.mark.parametrize("place", [0, 1])
def test_what_each_operand_and_each_output_saves_is_found(place: int) -> None:
    """Sums save nothing themselves."""
    x, rows = torch.ones(4, 3, requires_grad=True), torch.tensor([0, 2])
    operands = [x[:2].neg(), x[:2].neg()]
    operands[place] = x[rows].neg()
    for outputs in ((operands[0] + operands[1],), tuple(operands), (x.neg(), operands[0] + operands[1])):
        assert any(tensor.data_ptr() == rows.data_ptr() for tensor in saved_behind(outputs))


def test_what_is_saved_once_is_found_once() -> None:
    x = torch.ones(3, requires_grad=True)
    once = x.exp()
    assert len(list(saved_behind((once.neg() + once.neg(), once)))) == 1
