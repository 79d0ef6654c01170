"""Gradients made of what all ranks gather are those that autograd makes of all their samples."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from spindle_cli.costs.parameters import Summing
from spindle_cli.errors import InputError
from spindle_cli.operators.factors import Capturing
from spindle_cli.runtime.communication import gathered_bucket
from spindle_cli.runtime.communication.collectives import Members
from spindle_cli.runtime.communication.gathered_bucket import GatheredBucket

WORDS, WIDTH = 7, 3
RANKS = 3


class Gathered:
    """A gather that has ended, whose parts the test has copied."""

    def is_completed(self) -> bool:
        return True

    def wait(self, *_: object) -> bool:
        return True


def buckets_of(parameters: Sequence[nn.Parameter], way: Summing, tokens: int) -> list[GatheredBucket]:
    return [
        GatheredBucket("w", parameter, Members(len(parameters), rank, None), way, tokens)
        for rank, parameter in enumerate(parameters)
    ]


def finish(buckets: Sequence[GatheredBucket]) -> None:
    """Gather, without processes, and make the gradients."""
    with mock.patch.object(gathered_bucket, "start_gather", lambda *_: Gathered()):
        for bucket in buckets:
            bucket.start_sum()
    whole = [bucket._parts.flat.view(len(buckets), -1) for bucket in buckets]
    for rank, own in enumerate(whole):
        for other in whole:
            other[rank].copy_(own[rank].clone())
    for bucket in buckets:
        bucket.finish_sum()


def copies(like: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(like.clone()) for _ in range(RANKS)]


def test_rows_of_repeated_unused_and_padding_words_of_unequal_shares() -> None:
    """Rank 0 looks up twice, rank 1 once, with no sample of word 6; rank 2 has no samples."""
    torch.manual_seed(0)
    weight = torch.randn(WORDS, WIDTH, dtype=torch.float64)
    shares = [[torch.tensor([[1, 1], [2, 5]]), torch.tensor([1])], [torch.tensor([0, 5, 3])], []]
    coefficients = [[torch.randn(*ids.shape, WIDTH, dtype=torch.float64) for ids in own] for own in shares]
    whole = nn.Parameter(weight.clone())
    parameters = copies(weight)
    buckets = buckets_of(parameters, Summing.ROWS, 5)
    assert [own.counted for bucket in buckets for own in bucket.owned_ranges] == [True, False, False]
    for _ in range(2):  # a second iteration begins anew
        whole.grad = None
        for rank, parameter in enumerate(parameters):
            with Capturing({id(parameter): buckets[rank]}):
                for ids, factor in zip(shares[rank], coefficients[rank], strict=True):
                    (functional.embedding(ids, parameter, padding_idx=-2) * factor).sum().backward()
                    (functional.embedding(ids, whole, padding_idx=-2) * factor).sum().backward()
        assert all(parameter.grad is None for parameter in parameters)
        finish(buckets)
        assert whole.grad is not None
        for parameter in parameters:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, parameters[0].grad)  # bit for bit
            assert torch.allclose(parameter.grad, whole.grad, rtol=1e-14, atol=0)
            assert parameter.grad[5].eq(0).all()  # -2 of 7: the padding word
        for bucket in buckets:
            bucket.reset()
            assert bucket.parameter.grad is None


def test_factors_of_unequal_shares_leave_inputs_and_biases_their_gradients() -> None:
    torch.manual_seed(1)
    weight = torch.randn(4, WIDTH, dtype=torch.float64)
    shares = [torch.randn(2, 3, WIDTH, dtype=torch.float64), torch.randn(1, WIDTH, dtype=torch.float64), None]
    whole, bias = nn.Parameter(weight.clone()), nn.Parameter(torch.zeros(4, dtype=torch.float64))
    parameters = copies(weight)
    buckets = buckets_of(parameters, Summing.FACTORS, 6)
    for rank, own in enumerate(shares):
        if own is None:
            continue
        gradients = []
        for used, taking in ((whole, {}), (parameters[rank], {id(parameters[rank]): buckets[rank]})):
            x = own.clone().requires_grad_()
            bias.grad = None
            with Capturing(taking):
                functional.linear(x, used, bias).square().sum().backward()
            gradients.append((x.grad, bias.grad))
        assert all(torch.equal(*both) for both in zip(*gradients, strict=True))
    finish(buckets)
    for parameter in parameters:
        assert torch.allclose(parameter.grad, whole.grad, rtol=1e-14, atol=1e-14)
        assert torch.equal(parameter.grad, parameters[0].grad)


def test_what_no_rank_has_reached_has_no_gradient_and_what_one_has_is_zeros() -> None:
    """As in plain PyTorch: without a gradient optimizers leave a matrix alone, zeros still decay it."""
    parameters = copies(torch.ones(WORDS, WIDTH))
    buckets = buckets_of(parameters, Summing.ROWS, 1)
    finish(buckets)
    assert all(parameter.grad is None for parameter in parameters)
    for bucket in buckets:
        bucket.reset()
    buckets[1].take_rows(torch.tensor([2]), torch.zeros(1, WIDTH))
    finish(buckets)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in parameters)
    for bucket in buckets:
        bucket.reset()
    finish(buckets)  # what reached it in the iteration before has been forgotten
    assert all(parameter.grad is None for parameter in parameters)


def test_an_overflow_of_one_rank_comes_to_all() -> None:
    parameters = copies(torch.ones(WORDS, WIDTH))
    buckets = buckets_of(parameters, Summing.ROWS, 2)
    buckets[2].take_rows(torch.tensor([4]), torch.tensor([[1.0, float("inf"), 0.0]]))
    finish(buckets)
    assert all(parameter.grad[4, 1].isinf() for parameter in parameters)


def test_a_use_of_another_kind_is_refused_and_nothing_is_taken_without_gradients() -> None:
    parameter = nn.Parameter(torch.ones(WORDS, WIDTH))
    (bucket,) = buckets_of([parameter], Summing.ROWS, 4)
    ids = torch.tensor([1, 2])
    with Capturing({id(parameter): bucket}):
        with torch.no_grad():
            functional.embedding(ids, parameter)
        (functional.embedding(ids, parameter).sum() + parameter.sum()).backward()
    assert bucket._filled == 2
    with pytest.raises(InputError, match="w: its gradient is gathered by rows, but it has uses of another"):
        finish([bucket])
    with pytest.raises(InputError, match="but it is used by factors"):
        bucket.take_factors(torch.ones(1, WORDS), torch.ones(1, WIDTH))
    with pytest.raises(InputError, match="the plan has room for 4 tokens of a share"):
        bucket.take_rows(torch.tensor([0, 1, 2]), torch.ones(3, WIDTH))


def test_factors_may_be_narrower_than_the_gradient() -> None:
    """Of bfloat16 autocast: the product is rounded to bfloat16 once, as autograd does."""
    parameter = nn.Parameter(torch.ones(2, 2))
    bucket = GatheredBucket("w", parameter, Members(1, 0, None), Summing.FACTORS, 2, torch.bfloat16)
    with Capturing({id(parameter): bucket}), torch.autocast("cpu", torch.bfloat16):
        out = functional.linear(torch.tensor([[1.0, 2.0]]), parameter)
    out.float().sum().backward()
    finish([bucket])
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.float32
    assert parameter.grad.tolist() == [[1.0, 2.0], [1.0, 2.0]]
