"""What a backward pass has come to: parameters by hooks, and values between slices as the trace says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradient_toys import Stop
from torch import nn

from spindle_cli.errors import WorkloadError
from spindle_cli.runtime.communication.buckets import Reached
from spindle_cli.runtime.step.compute import require_planned_gradients


def test_a_function_that_ends_with_none_comes_to_no_parameter() -> None:
    stopped, used = (nn.Parameter(torch.ones(2)) for _ in range(2))
    for parameter in (stopped, used):
        parameter.grad = torch.zeros(2)  # as buckets give them
    reached = Reached([stopped, used])
    (Stop.apply(2 * stopped) + used).sum().backward()  # type: ignore[no-untyped-call]
    assert reached.flags == [False, True]
    (2 * stopped).sum().backward()
    assert reached.flags == [True, True]
    reached.reset()
    assert reached.flags == [False, False]


def wired(*names: str, sees: bool = True) -> Any:
    edge = SimpleNamespace(differentiable=[SimpleNamespace(name=name) for name in names])
    op = SimpleNamespace(inputs=("h", "context"), target="fuse", sees_gradients=sees)
    return SimpleNamespace(incoming=[edge], ops=(op,), piece=SimpleNamespace(label="t/fuse[0:1]"))


@pytest.mark.parametrize(
    ("planned", "found", "said"),
    [
        (("h", "context"), ("h",), "'context' it gave one, and none comes in this step"),
        (("h",), ("h", "context"), "'context' it gave none, and one comes in this step"),
    ],
)
def test_other_gradients_than_were_traced_end_the_run(
    planned: tuple[str, ...], found: tuple[str, ...], said: str
) -> None:
    require_planned_gradients(wired(*planned), planned)
    require_planned_gradients(wired(*planned, sees=False), found)
    with pytest.raises(
        WorkloadError, match=rf"t/fuse\[0:1\]: fuse gives other gradients .* {said}"
    ) as raised:
        require_planned_gradients(wired(*planned), found)
    assert "x + keep * y" in str(raised.value.hint)
