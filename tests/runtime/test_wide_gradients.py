"""Gradients of bfloat16 parameters are added up in float32, over batches and over ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from alone import world_of_one
from pydantic import ValidationError
from torch import nn

from helpers.torch_versions import widens_gradients
from spindle_cli.errors import WorkloadError
from spindle_cli.runtime.communication.buckets import Bucket, Flags, ShardedBucket
from spindle_cli.runtime.communication.collectives import Members
from spindle_cli.runtime.update.masters import Masters
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.training.precision import gradient_dtype, widen_gradients
from spindle_cli.workload.file import TrainSettings

# bfloat16 has 8 bits: beside 1 it cannot say 1/512, however often it is added.
BATCHES, SMALL = 8, 2.0**-9
WIDE, NARROW = TrainSettings(precision="bf16"), TrainSettings(precision="bf16", reduce="parameters")


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


def parameter(train: TrainSettings) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    widen_gradients([made], train)
    return made


def backward(parameter: nn.Parameter) -> None:
    """A gradient of 1, and seven of 1/512."""
    for batch in range(BATCHES):
        (parameter * (SMALL if batch else 1.0)).sum().backward()


@pytest.mark.parametrize(
    ("train", "summed"), [pytest.param(WIDE, 1 + 7 * SMALL, marks=widens_gradients), (NARROW, 1.0)]
)
@pytest.mark.parametrize("way", ["own", "whole", "sharded"])
def test_small_gradients_are_not_lost_beside_large_ones(
    way: str, train: TrainSettings, summed: float
) -> None:
    stepped = parameter(train)
    members = Members(1, 0, None)
    if way == "own":
        owned_ranges: tuple[OwnedRange, ...] = (OwnedRange("w", None, stepped),)
        backward(stepped)
    elif way == "whole":
        bucket = Bucket({"w": stepped}, members)
        owned_ranges = bucket.owned_ranges
        backward(stepped)
        bucket.start_sum()
        bucket.finish_sum()
    else:
        sharded = ShardedBucket({"w": stepped}, members)
        flags = Flags([sharded], None)
        owned_ranges = sharded.owned_ranges
        backward(stepped)
        sharded.hand_out(flags._reached.flags)
    masters = Masters(owned_ranges)
    masters.take_gradients()
    (master,) = masters.owned_ranges
    assert master.tensor.grad is not None
    assert master.tensor.grad.dtype == torch.float32
    assert master.tensor.grad.tolist() == [summed] * 4
    assert stepped.dtype == torch.bfloat16


@widens_gradients
def test_a_piece_of_a_parameter_has_its_part_of_the_wide_gradient() -> None:
    """Two ranks: the second owns the last 32 of 64 elements, and steps them alone."""
    whole = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    widen_gradients([whole], WIDE)
    bucket = ShardedBucket({"w": whole}, Members(2, 1, None))
    (whole * torch.arange(64.0)).sum().backward()
    bucket.hand_out([True])
    (piece,) = bucket.owned_ranges
    assert piece.part == (32, 64)
    assert piece.tensor.grad is not None
    assert piece.tensor.grad.tolist() == list(range(32, 64))
    assert piece.tensor.grad.dtype == torch.float32


@widens_gradients
def test_masters_take_wide_gradients_without_a_copy() -> None:
    held = parameter(WIDE)
    backward(held)
    masters = Masters([OwnedRange("w", None, held)])
    masters.take_gradients()
    assert masters.owned_ranges[0].tensor.grad is held.grad
    masters.hand_back()
    assert masters.owned_ranges[0].tensor.grad is None


@pytest.mark.parametrize(
    ("settings", "wide", "gradients", "update"),
    [
        ({}, False, 1.0, 0.0),
        ({"precision": "bf16-autocast", "reduce": "float32"}, False, 1.0, 0.0),
        pytest.param({"precision": "bf16"}, True, 2.0, 0.0, marks=widens_gradients),
        pytest.param({"precision": "bf16", "reduce": "float32"}, True, 2.0, 0.0, marks=widens_gradients),
        ({"precision": "bf16", "reduce": "parameters"}, False, 1.0, 2.0),
    ],
)
def test_which_gradients_are_wide(
    settings: dict[str, object], wide: bool, gradients: float, update: float
) -> None:
    train = TrainSettings.model_validate(settings)
    assert (train.widens_gradients, train.gradient_bytes_per_param) == (wide, gradients)
    assert train.update_bytes_per_param == update
    held = parameter(train)
    assert gradient_dtype(held) == (torch.float32 if wide else torch.bfloat16)
    # A dtype that a command asks for is that of all arithmetic.
    assert not train.in_full_precision().widens_gradients


def test_a_torch_that_cannot_is_refused_where_gradients_are_to_be_wide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spindle_cli.training.precision.Tensor", object)  # as one before 2.10
    with pytest.raises(WorkloadError, match=r"bf16 adds gradients up in float32, which torch .* cannot"):
        parameter(WIDE)
    assert gradient_dtype(parameter(NARROW)) == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reduce": "float32"}, "reduce: float32 goes with precision: bf16"),
        ({"reduce": "bfloat16"}, "'float32' or 'parameters'"),
        ({"float32_matmul": "tf32"}, "'highest', 'high' or 'medium'"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainSettings.model_validate(settings)
