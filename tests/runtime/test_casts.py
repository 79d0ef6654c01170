"""Casts of weights are kept over the forward passes of a batch that use them, and no longer."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.torch_versions import keeps_casts
from spindle_cli.runtime.step.casts import CastWeights

X = torch.ones(2, 3)


def local(
    *modules: nn.Module, recompute: bool = False, offload: tuple[Any, ...] = (), changes: Any = ()
) -> Any:
    """What is asked of a slice."""
    ops = [SimpleNamespace(changes=changes) for _ in modules]
    piece = SimpleNamespace(recompute=recompute, offload=offload)
    return SimpleNamespace(modules=modules, wired=SimpleNamespace(slice=piece, ops=ops))


class Casts(TorchDispatchMode):
    """Counts what is cast of weights of 3 by 3."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.ops.aten._to_copy.default
            and args[0].shape == (3, 3)
            and args[0].dtype == torch.float32
        ):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3, bias=False)


def run(casts: CastWeights, order: list[int], slices: dict[int, Any]) -> Iterator[int]:
    """Forward and backward of each slice; how many weights each has cast."""
    with casts.kept():
        for piece in order:
            with Casts() as counted:
                with torch.autocast("cpu", torch.bfloat16):
                    out: Tensor = X
                    for module in slices[piece].modules:
                        out = module(out)
                casts.ran(piece)
            assert not torch.is_autocast_enabled("cpu")
            out.float().sum().backward()
            yield counted.count


@keeps_casts
def test_micro_batches_cast_a_weight_once_and_a_batch_begins_anew(layer: nn.Linear) -> None:
    slices = {piece: local(layer) for piece in range(3)}
    casts = CastWeights([0, 1, 2], slices, keeps=True)
    assert list(run(casts, [0, 1, 2], slices)) == [1, 0, 0]
    kept = layer.weight.grad
    layer.weight.grad = None
    with torch.no_grad():
        layer.weight.add_(1.0)  # an update between batches
    assert list(run(casts, [0, 1, 2], slices)) == [1, 0, 0]
    assert layer.weight.grad is not None and kept is not None
    assert torch.equal(layer.weight.grad, kept)  # of a linear map it does not depend on the weight


@keeps_casts
def test_the_gradients_are_those_of_passes_that_cast_for_themselves(layer: nn.Linear) -> None:
    slices = {piece: local(layer, layer) for piece in range(2)}
    found: list[Tensor] = []
    for keeps in (True, False):
        layer.weight.grad = None
        counts = list(run(CastWeights([0, 1], slices, keeps=keeps), [0, 1], slices))
        assert counts == ([1, 0] if keeps else [1, 1])
        assert layer.weight.grad is not None
        found.append(layer.weight.grad)
    assert torch.equal(*found)


@keeps_casts
def test_a_pass_that_casts_anew_has_a_gradient_as_soon_as_its_op_is_through() -> None:
    """What a pass takes over was made before all of it, and autograd comes to it behind all of it."""
    layers = [nn.Linear(3, 3, bias=False) for _ in range(2)]
    slices = {piece: local(*layers) for piece in range(3)}
    casts = CastWeights([0, 1, 2], slices, keeps=True)
    complete: list[bool] = []

    def run_watched() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            x = layers[0](X)
            x.register_hook(lambda _: complete.append(layers[1].weight.grad is not None))
            out = layers[1](x)
        layers[1].weight.grad = None
        out.float().sum().backward()

    with casts.kept():
        for renews in (False, False, True):
            if renews:
                casts.renew()
            run_watched()
    assert complete == [True, False, True]


@keeps_casts
def test_what_no_later_pass_uses_is_let_go_at_once(layer: nn.Linear) -> None:
    """The other task's passes come last; between them this one's would be cast again."""
    other = nn.Linear(3, 3, bias=False)
    slices = {0: local(layer), 1: local(layer), 2: local(other), 3: local(other)}
    casts = CastWeights([0, 1, 2, 3], slices, keeps=True)
    assert list(run(casts, [0, 1, 0, 2, 3], slices)) == [1, 0, 1, 1, 0]


@pytest.mark.parametrize(
    "gives_up", [{"recompute": True}, {"offload": ((0, 1),)}, {"changes": ("weight",)}], ids=str
)
def test_where_memory_is_short_or_weights_change_each_pass_casts_for_itself(
    layer: nn.Linear, gives_up: dict[str, Any]
) -> None:
    slices = {0: local(layer), 1: local(layer, **gives_up)}
    casts = CastWeights([0, 1], slices, keeps=True)
    assert list(run(casts, [0, 1], slices)) == [1, 1]


def test_a_torch_that_keeps_casts_without_gradients_is_not_asked_to(
    layer: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = {0: local(layer), 1: local(layer)}
    monkeypatch.setattr("spindle_cli.runtime.step.casts.keeps_gradients", lambda: False)
    assert list(run(CastWeights([0, 1], slices, keeps=True), [0, 1], slices)) == [1, 1]


def test_nothing_is_kept_behind_a_pass_that_fails(layer: nn.Linear) -> None:
    slices = {0: local(layer), 1: local(layer)}
    casts = CastWeights([0, 1], slices, keeps=True)
    with pytest.raises(ZeroDivisionError), casts.kept():
        with torch.autocast("cpu", torch.bfloat16):
            layer(X)
        raise ZeroDivisionError
    with Casts() as counted, torch.autocast("cpu", torch.bfloat16):
        layer(X)
    assert counted.count == 1
