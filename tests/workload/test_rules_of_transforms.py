"""Fourier transforms, functions of matrices and activations without a tag: each sample by itself, or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.rules.types import Batch, Mixed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task, Workload
from workload.shares import run_plain, run_shares
from workload.test_rules import findings, state_of
from workload.toy import Block, Items

TOKENS, WIDTH = 4, 6


def squares(x: Tensor) -> Tensor:
    """A positive definite matrix for each sample."""
    return x @ x.mT + 3 * torch.eye(TOKENS, device=x.device)


def spectrum(x: Tensor, **more: Any) -> Tensor:
    window = torch.hann_window(8, device=x.device)
    return torch.stft(x.flatten(1), 8, 4, window=window, return_complex=True, **more).abs()


def pooled_and_back(x: Tensor) -> Tensor:
    pooled, places = functional.max_pool1d(x, 2, return_indices=True)
    return functional.max_unpool1d(pooled, places, 2)


def twice(x: Tensor, *, in_turn: bool) -> Tensor:
    """Every sample twice: one behind the other, or all once and then all again."""
    return x.repeat_interleave(2, 0) if in_turn else x.repeat(2, *[1] * (x.dim() - 1))


def bags(x: Tensor, weights: Tensor) -> Tensor:
    numbers = x.detach().abs().long().flatten() % 4
    offsets = torch.arange(0, len(numbers), numbers.shape[0] // x.shape[0], device=x.device)
    table = torch.arange(8.0, device=x.device).view(4, 2)
    return functional.embedding_bag(numbers, table, offsets, mode="sum", per_sample_weights=weights)


def sorted_by(x: Tensor, *, in_turn: bool) -> Tensor:
    row = twice(x.detach(), in_turn=True)
    order = twice(x.detach(), in_turn=in_turn).argsort(-1)
    return torch.searchsorted(row, row, sorter=order)


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "log sigmoid": functional.logsigmoid,
    "hard swish": functional.hardswish,
    "slopes of channels": lambda x: functional.prelu(x, torch.arange(4.0, device=x.device)),
    "one slope": lambda x: functional.prelu(x, torch.full((1,), 0.1, device=x.device)),
    "whole parts": lambda x: (x.detach() * 10) // 3,
    "lengths behind strides": lambda x: ((x.detach() * 10).long()[:, 0, 0] + 1) // 2,
    "compared in place": lambda x: x.detach().clone().ge_(0.5),
    "summed up in place": lambda x: (x * 1).cumsum_(1),
    "lower triangles in place": lambda x: (x * 1).tril_(),
    "activation in place": lambda x: functional.mish(x * 1, inplace=True),
    "spectrum": lambda x: torch.fft.rfft(x).abs(),
    "spectrum of tokens": lambda x: torch.fft.fft(x, dim=1).real,
    "in two dimensions": lambda x: torch.fft.fft2(x).imag,
    "there and back": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=WIDTH),
    "overlapping windows": spectrum,
    "overlapping windows without padding": lambda x: spectrum(x, center=False),
    "overlapping windows of every channel": lambda x: (
        torch.stft(
            x.repeat(1, 1, 4).flatten(0, 1), 8, 2, window=torch.ones(8, device=x.device), return_complex=True
        )
        .abs()
        .unflatten(0, (-1, TOKENS))
    ),
    "inverse": lambda x: torch.linalg.inv(squares(x)),
    "logarithm of a determinant": lambda x: torch.linalg.slogdet(squares(x))[1],
    "solved": lambda x: torch.linalg.solve(squares(x), x),
    "solved for a vector": lambda x: torch.linalg.solve(squares(x), x[..., 0]),
    "solved by triangles": lambda x: torch.linalg.solve_triangular(squares(x).tril(), x, upper=False),
    "solved by a factor": lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(squares(x))),
    "singular values": torch.linalg.svdvals,
    "eigenvalues": lambda x: torch.linalg.eigvalsh(squares(x)),
    "orthogonal and triangular": lambda x: torch.linalg.qr(x)[1],
    "exponential": lambda x: torch.linalg.matrix_exp(squares(x) / 10),
    "pseudo-inverse": lambda x: torch.linalg.pinv(x),
    "cross product": lambda x: torch.linalg.cross(x[..., :3], x[..., 3:]),
    "diagonal matrices": torch.diag_embed,
    "buckets": lambda x: torch.bucketize(x.detach(), torch.arange(3.0, device=x.device)),
    "places in each sample's own row": lambda x: torch.searchsorted(x.detach().sort(-1)[0], x.detach()),
    "places in each sample's own row in order": lambda x: sorted_by(x, in_turn=True).unflatten(0, (-1, 2))[
        :, 0
    ],
    "weighted bags": lambda x: bags(x, x.flatten()),
    "products in place": lambda x: (x * 1).cumprod_(1),
    "token put in, samples second": lambda x: (
        x.transpose(0, 1).select_scatter(x[:, 0] * 2, 0, 1).transpose(0, 1)
    ),
    "turned": lambda x: x.rot90(1, (1, 2)),
    "filled": lambda x: x.index_fill(1, torch.tensor([0, 2], device=x.device), 0.5),
    "part put in": lambda x: x.slice_scatter(x[:, :2] * 2, 1, 1, 3),
    "token put in": lambda x: x.select_scatter(x[:, 0] * 2, 1, 3),
    "largest of groups": lambda x: x.new_zeros(x.shape[0], 3, WIDTH).index_reduce(
        1, torch.tensor([0, 1, 2, 0], device=x.device), x, "amax"
    ),
    "unpooled": pooled_and_back,
    "grid of each sample": lambda x: functional.affine_grid(
        x[:, :2, :3], [x.shape[0], 1, 2, 2], align_corners=False
    ),
}
MIXES: dict[str, Callable[[Tensor], Any]] = {
    "slopes that the batch gives": lambda x: functional.prelu(x, x.mean((0, 2))),
    "whole parts of a mean": lambda x: x.detach() // x.detach().mean(0),
    "summed up over the batch in place": lambda x: (x * 1).cumsum_(0),
    "spectrum of the batch": lambda x: torch.fft.fft(x, dim=0).real,
    "spectrum with the batch": lambda x: torch.fft.fftn(x).real,
    "windows over samples": lambda x: torch.stft(
        x.reshape(-1), 8, 8, window=torch.ones(8), center=False, return_complex=True
    ).abs(),
    "windows that reach into the next sample": lambda x: x.contiguous().as_strided(
        (x.shape[0], 2, 14), (24, 12, 1)
    ),
    "windows that reach the next sample's first entry": lambda x: x.contiguous().as_strided(
        (x.shape[0], 2, 13), (24, 12, 1)
    ),
    "places in another sample's order": lambda x: sorted_by(x, in_turn=False),
    "bags with the weights of others": lambda x: bags(x, x.transpose(0, 1).flatten()),
    "bags up to the last": lambda x: functional.embedding_bag(
        x.detach().abs().long().flatten() % 4,
        torch.ones(4, 2),
        torch.arange(0, x.numel(), 24),
        mode="sum",
        include_last_offset=True,
    ),
    "products over the batch in place": lambda x: (x * 1).cumprod_(0),
    "filled where any sample says": lambda x: x.index_fill(1, x[:, 0, 0].detach().abs().long() % 4, 0.5),
    "solved for the vectors of others": lambda x: torch.linalg.solve(
        twice(squares(x), in_turn=True), twice(x[..., 0], in_turn=False)
    ),
    "unpooled over the batch": lambda x: functional.max_unpool2d(
        x.transpose(0, 1)[None], torch.zeros_like(x.transpose(0, 1)[None], dtype=torch.int64), 2
    ),
    "grids of the batch's size": lambda x: functional.affine_grid(
        x[:, :2, :3], [x.shape[0], 1, x.shape[0], 2], align_corners=False
    ),
    "windows by the batch's size": lambda x: x.contiguous().as_strided((x.shape[0], 2), (24, x.shape[0])),
    "samples from another place": lambda x: x.contiguous().as_strided((x.shape[0], 2), (24, 1), 2),
    "windows of what lies apart": lambda x: x[:, :, ::2].as_strided((x.shape[0], 5), (24, 1)),
    "windows of what lies behind each other": lambda x: x.transpose(0, 1).as_strided((x.shape[0], 4), (4, 1)),
    "matrix of the batch": lambda x: torch.linalg.qr(x[:, 0])[1],
    "solved with the batch as a side": lambda x: torch.linalg.solve(torch.eye(4), x[:, :, 0].T),
    "turned with the batch": lambda x: x.rot90(2, (0, 1)),
    "diagonal of the batch": lambda x: torch.diag_embed(x[:, 0, 0]),
    "places in the batch": lambda x: torch.searchsorted(x[:, 0, 0].detach().sort()[0], x[:, 0, 0].detach()),
    "token of the mean put in": lambda x: x.select_scatter(x.mean((0, 1)).expand(x.shape[0], -1), 1, 3),
}


# Where torch has no in-place operation's namesake, or has tagged that alone.
IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        name: lambda x, y, name=name: getattr(x, name)(y)
        for name in (
            "copysign_",
            "heaviside_",
            "xlogy_",
            "floor_divide_",
            "eq_",
            "ne_",
            "ge_",
            "gt_",
            "le_",
            "lt_",
        )
    },
    **{
        name: lambda x, y, name=name: getattr((x * 10).long(), name)((y * 10).long().abs() % 4)
        for name in ("gcd_", "lcm_", "__irshift__")
    },
    "abs_": lambda x, _: x.abs_(),
    "gelu_": lambda x, _: torch.ops.aten.gelu_(x),
    "mish_": lambda x, _: torch.ops.aten.mish_(x),
    "hardswish_": lambda x, _: functional.hardswish(x, inplace=True),
    "threshold_": lambda x, _: functional.threshold(x, 0.1, 20.0, inplace=True),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_works_in_place_without_a_tag_acts_on_entries(name: str) -> None:
    assert state_of(lambda x: IN_PLACE[name](x.detach().clone(), x.detach()[:, :1])) == Batch(0)
    found = findings(lambda x: IN_PLACE[name](x.detach().clone(), x.detach().mean(0)))
    uses_both = name not in ("abs_", "gelu_", "mish_", "hardswish_", "threshold_")
    assert (found.why_not is not None or isinstance(found.states[0], Mixed)) == uses_both


@pytest.mark.parametrize("name", ROWS)
def test_what_acts_on_samples_one_by_one_is_followed_and_gives_shares_their_rows(name: str) -> None:
    code = ROWS[name]
    assert state_of(code) == Batch(0)
    x = torch.randn(7, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(torch.cat([code(x[:3]), code(x[3:])]), code(x))


@pytest.mark.parametrize("name", MIXES)
def test_what_works_along_the_batch_is_not_taken_for_samples_one_by_one(name: str) -> None:
    found = findings(MIXES[name])
    assert found.why_not is not None or isinstance(found.states[0], Mixed)


class OfMemory(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.code = Block(WIDTH), code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.block(x)).pow(2).mean()


def _of_memory(code: Callable[[Tensor], Tensor]) -> Workload:
    return Workload("w", [Task("t", OfMemory(code), 6, Items(x=(TOKENS, WIDTH)))], (Block,))


def test_a_loss_that_reaches_into_other_samples_memory_stays_whole() -> None:
    task = analysed(_of_memory(lambda x: x.contiguous().as_strided((x.shape[0], WIDTH), (WIDTH, 1)))).tasks[
        "t"
    ]
    assert task.ops[-1].coupled
    batch = {"x": torch.randn(6, TOKENS, WIDTH)}
    torch.testing.assert_close(run_shares(task, batch, {0: 3}), run_plain(task.task, batch))


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x.mT.as_strided((x.shape[0], 4), (24, 1)),
        lambda x: x[:, 1:].as_strided((x.shape[0], 4), (24, 1)),
        lambda x: torch.stack([x, x * 2])[1].as_strided((x.shape[0], 4), (24, 1), 0),
        lambda x: torch.as_strided(torch.stack([x, x * 2])[1], (6, 4), (24, 1), storage_offset=0),
    ],
)
def test_entries_by_where_they_lie_before_an_op_hands_them_on_are_refused(
    code: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(WorkloadError, match=r"test_rules_of_transforms.py.*by where they lie in memory"):
        analysed(_of_memory(code))


def test_a_survival_loss_of_log_sigmoids_is_split() -> None:
    def code(x: Tensor) -> Tensor:
        survived = functional.logsigmoid(-x[:, 0]).cumsum(1)
        return torch.where(x[:, 1] > 0, survived, functional.logsigmoid(x[:, 0])).sum(1)

    assert state_of(code) == Batch(0)
    assert math.isclose(float(code(torch.zeros(1, 2, 1))[0]), -math.log(2), rel_tol=1e-6)
