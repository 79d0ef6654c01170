"""How a task's loss comes about, by what forward returns for two samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spindle_cli.errors import UsageError
from spindle_cli.init.trial import choose_loss
from spindle_cli.init.types import FieldSpec, StubLoss

X = FieldSpec("x", (6, 4))


class Returns(nn.Module):
    """Of x, [samples, 6, 4], what a function makes."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize(
    "make", [torch.Tensor.mean, lambda x: {"loss": x.sum(), "more": x}], ids=["a scalar", "a dict with it"]
)
def test_a_scalar_is_the_loss(make: Any) -> None:
    assert choose_loss("a", Returns(make), (X,), None) == StubLoss()
    assert choose_loss("a", Returns(make), (X,), "mse_loss") == StubLoss()


@pytest.mark.parametrize(
    "make",
    [lambda x: x.mean((1, 2)), lambda x: x.sum().long(), lambda x: {"loss": x.mean((1, 2))}],
    ids=["one for each sample", "a whole number", "one for each sample in a dict"],
)
def test_anything_else_is_none(make: Any) -> None:
    with pytest.raises(UsageError, match="expected a scalar loss"):
        choose_loss("a", Returns(make), (X,), None)


def test_the_classes_of_cross_entropy_are_the_second_dimension() -> None:
    loss = choose_loss("a", Returns(lambda x: x), (X,), "cross_entropy")
    assert loss.target == FieldSpec("target", (4,), 6)
    with pytest.raises(UsageError, match="one number for each sample"):
        choose_loss("a", Returns(lambda x: x.mean((1, 2))), (X,), "cross_entropy")


def test_other_losses_compare_with_numbers_of_the_same_shape() -> None:
    loss = choose_loss("a", Returns(lambda x: {"logits": x}), (X,), "mse_loss")
    assert loss == StubLoss("mse_loss", "logits", target=FieldSpec("target", (6, 4)))
    binary = choose_loss("a", Returns(lambda x: x), (X,), "binary_cross_entropy_with_logits")
    assert binary.target == FieldSpec("target", (6, 4), is_binary=True)


def test_scores_without_a_row_for_each_sample_have_no_loss() -> None:
    with pytest.raises(UsageError, match="for 2 samples"):
        choose_loss("a", Returns(lambda x: x[0]), (X,), "mse_loss")
