"""A loss in chunks is the loss in one go, with the same gradients, in less memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import head_toys
import pytest
import torch
from head_toys import BATCH, TOKENS, WIDTH, WORDS, batch_of, task_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.torch_versions import widens_gradients
from spindle_cli.analysis.losses.counts import LossCounter
from spindle_cli.operators.heads import chunked as in_chunks
from spindle_cli.operators.heads.chunked import LossInChunks, loss_in_chunks, timed_op
from spindle_cli.operators.heads.chunks import Chunk, choose_chunks
from spindle_cli.profile.estimating import fake_memory as fake_memories
from spindle_cli.profile.estimating.fake_memory import fake_memory
from spindle_cli.profile.op import counting
from spindle_cli.profile.op.counting import count_work
from spindle_cli.profile.op.op_memory import LiveBytes
from spindle_cli.runtime.step.recompute import run_recomputed
from spindle_cli.workload.file import LossChunks, TrainSettings
from spindle_cli.workload.graph import TaskGraph

EXACT = 1e-12
LOSSES = ("causal", "smoothed", "squared", "weighted", "shifted", "rooted", "running", "twice")
SHARE = 3  # samples of the share that is run, of the batch's four
SEED = 0.7  # the gradient of the total loss with regard to the share's


def arguments_of(task: TaskGraph, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Of a share of the last op: fields, a hidden state that takes a gradient, share, counts."""
    op, fields = task.ops[-1], batch_of()
    counts: tuple[Tensor, ...] = ()
    if op.shares.num_counts:
        counts = LossCounter(task.root, op.shares).count(fields, 1.0).unbind()
    hidden = torch.randn(SHARE, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = [fields[name][:SHARE] for name in op.fields]
    return [*given, hidden.requires_grad_(), SHARE / BATCH, *counts]


def chunked(task: TaskGraph, setting: LossChunks, rows: int = SHARE) -> LossInChunks:
    return loss_in_chunks(task, task.ops[-1], rows, setting)


def passed(run: Callable[..., Tensor], module: nn.Module, arguments: list[Any]) -> dict[str, Tensor]:
    """The loss and all gradients."""
    for tensor in (*module.parameters(), *arguments):
        if isinstance(tensor, Tensor):
            tensor.grad = None
    loss = run(*arguments)
    loss.backward(torch.tensor(SEED, dtype=loss.dtype))
    (hidden,) = (each for each in arguments if isinstance(each, Tensor) and each.requires_grad)
    # Of a tied parameter's names the last.
    names = {id(tensor): name for name, tensor in sorted(module.named_parameters(remove_duplicate=False))}
    found = {names[id(parameter)]: parameter.grad for parameter in module.parameters()}
    return {**found, "loss": loss.detach(), "hidden": hidden.grad}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], within: float) -> bool:
    return found.keys() == expected.keys() and all(
        (found[name] - expected[name]).abs().max() <= within * expected[name].abs().max().clamp(min=1e-3)
        for name in expected
    )


# By loss, into how many chunks a share is cut at most.
MOST_CHUNKS = {
    "causal": SHARE * TOKENS,
    "smoothed": SHARE * TOKENS,
    "squared": SHARE * TOKENS,
    "weighted": SHARE,  # a mean over a sample's own tokens is its own
    "shifted": SHARE,
    "rooted": SHARE,
    "running": SHARE,
    "twice": SHARE * TOKENS,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_chunks_has_the_value_and_the_gradients_of_one_in_one_go(name: str) -> None:
    """Samples are cut first, and tokens where they are apart."""
    task = task_of(getattr(head_toys, name), bias=name == "squared")
    task.root.double()
    whole = task.share_module(task.ops[-1])
    arguments = arguments_of(task)
    expected = passed(whole, whole, arguments)
    counts = []
    for setting in (2, 3, 5, 1000):
        found = chunked(task, setting)
        counts.append(found.count)
        assert same(passed(found.module, found.module, arguments), expected, EXACT), setting
    assert counts[:2] == [SHARE, SHARE]  # at most 2 / 3 of a share's elements: one sample each
    assert counts[-1] == MOST_CHUNKS[name]


def test_a_sample_is_cut_into_as_few_parts_as_are_asked_for() -> None:
    """At most 5 of 7 tokens: 2 parts of each sample."""
    assert chunked(task_of(head_toys.causal), 4).count == SHARE * 2


def test_recomputed_the_loss_in_chunks_is_the_same_and_takes_gradients_once() -> None:
    task = task_of(head_toys.causal)
    task.root.double()
    module, arguments = chunked(task, 3).module, arguments_of(task)
    expected = passed(module, module, arguments)
    backward_passes = 0

    def note(*_: object) -> None:
        nonlocal backward_passes
        backward_passes += 1

    original = torch.autograd.grad
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            torch.autograd, "grad", lambda *args, **kwargs: (note(), original(*args, **kwargs))[1]
        )
        found = passed(lambda *given: run_recomputed(module, given), module, arguments)
    assert same(found, expected, 0.0)
    assert backward_passes == 3


def test_without_gradients_the_loss_in_chunks_is_the_same() -> None:
    task = task_of(head_toys.causal)
    whole, found = task.share_module(task.ops[-1]), chunked(task, 3)
    arguments = arguments_of(task, torch.float32)
    with torch.no_grad():
        assert torch.allclose(found.module(*arguments), whole(*arguments), rtol=1e-6)


def test_frozen_parameters_get_no_gradient() -> None:
    task = task_of(head_toys.causal, bias=True)
    task.root.get_parameter("head.weight").requires_grad_(False)
    module, arguments = chunked(task, 3).module, arguments_of(task, torch.float32)
    module(*arguments).backward()
    held = dict(module.named_parameters())
    assert held["head.weight"].grad is None and held["head.bias"].grad is not None


def test_under_autocast_gradients_are_no_farther_from_the_exact_ones_than_in_one_go() -> None:
    task = task_of(head_toys.causal)
    exact_task = task_of(head_toys.causal)
    exact_task.root.double()
    exact_module = exact_task.share_module(exact_task.ops[-1])
    exact = passed(exact_module, exact_module, arguments_of(exact_task))
    errors = []
    for module in (task.share_module(task.ops[-1]), chunked(task, 3).module):
        with torch.autocast("cpu", torch.bfloat16):
            found = passed(module, module, arguments_of(task, torch.float32))
        errors.append((found["head.weight"] - exact["head.weight"]).abs().max())
    assert errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize("scale", [2.0**8, 2.0**17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_float16_gradients_are_those_of_the_scaled_loss(dtype: torch.dtype, scale: float) -> None:
    """2^17 is no float16 number: gradients taken at 1 and scaled afterwards would all be infinite."""
    task = task_of(head_toys.causal)
    found = []
    for module in (task.share_module(task.ops[-1]), chunked(task, 3).module):
        arguments = arguments_of(task, dtype)
        (hidden,) = (each for each in arguments if isinstance(each, Tensor) and each.requires_grad)
        module.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = module(*arguments)
        (loss * scale).backward()
        weight = dict(module.named_parameters())["head.weight"].grad
        assert weight is not None and hidden.grad is not None
        found.append((loss.detach(), weight.clone(), hidden.grad))
    for one, other in zip(*found, strict=True):
        assert torch.isfinite(other).all()
        assert 0 < one.abs().max() < torch.inf
        assert (one - other).abs().max() <= 2e-3 * one.abs().max()


@pytest.mark.parametrize(("dtype", "forward", "backward"), [(torch.bfloat16, 3, 0), (torch.float16, 0, 3)])
def test_in_float16_alone_gradients_are_taken_in_the_backward_pass(
    dtype: torch.dtype, forward: int, backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There what the loss is scaled by is known, without which small ones would vanish."""
    task = task_of(head_toys.causal)
    module, taken = chunked(task, 3).module, 0
    original = torch.autograd.grad

    def grad(*arguments: Any, **named: Any) -> Any:
        nonlocal taken
        taken += 1
        return original(*arguments, **named)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    with torch.autocast("cpu", dtype):
        loss = module(*arguments_of(task, torch.float32))
    assert taken == forward
    loss.backward()
    assert taken == forward + backward


def test_in_float16_chunks_are_counted_forward_twice() -> None:
    task = task_of(head_toys.causal)
    op = task.ops[-1]
    at_once, later = (
        count_work(task, op, SHARE, precision, loss_chunks=3) for precision in ("bfloat16", "float16")
    )

    def flops(kernels: Any) -> float:
        return sum(kernel.flops for kernel in kernels)

    product = 2 * SHARE * TOKENS * WIDTH * WORDS  # of the head: one forward, two backward
    assert flops(at_once.forward) - flops(later.forward) == 2 * product
    assert flops(later.backward) - flops(at_once.backward) == 3 * product


def test_recomputed_in_float16_the_loss_in_chunks_is_the_same() -> None:
    task = task_of(head_toys.causal)
    module, arguments = chunked(task, 3).module, arguments_of(task, torch.float32)
    with torch.autocast("cpu", torch.float16):
        expected = passed(module, module, arguments)
        found = passed(lambda *given: run_recomputed(module, given), module, arguments)
    assert same(found, expected, 0.0)


@widens_gradients
def test_bfloat16_parameters_get_float32_gradients_where_these_are_asked_for() -> None:
    task = task_of(head_toys.causal)
    task.root.bfloat16()
    module = chunked(task, 1000).module
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    found = passed(module, module, arguments_of(task, torch.bfloat16))
    assert found["head.weight"].dtype == torch.float32
    rounded = found["head.weight"].bfloat16().float()
    assert not torch.equal(rounded, found["head.weight"])  # added up in float32, not in bfloat16


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dropped", "draws random numbers"),
        ("two_results", "leads to 2 results"),
        ("counted_inside", "neither a sum nor a mean"),
    ],
)
def test_what_cannot_be_cut_stays_whole_and_says_why(name: str, why: str) -> None:
    found = chunked(task_of(getattr(head_toys, name)), 3)
    assert found.count == 1 and why in found.why_whole


def test_a_head_with_a_hook_stays_whole() -> None:
    task = task_of(head_toys.causal)
    task.root.get_submodule("head").register_forward_hook(lambda *_: None)
    assert "head has hooks" in chunked(task, 3).why_whole


def test_by_default_a_small_loss_is_computed_in_one_go() -> None:
    found = chunked(task_of(head_toys.causal), "auto")
    assert found.count == 1 and found.why_whole is None


def test_by_default_no_chunk_is_larger_than_the_parameters_that_make_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """41 x 6 parameters: 6 of a sample's 7 tokens have as many logits, so each is cut in two."""
    monkeypatch.setattr(in_chunks, "_FEWEST_ELEMENTS", 10)
    assert chunked(task_of(head_toys.causal), "auto").count == 2 * SHARE
    monkeypatch.setattr(in_chunks, "_FEWEST_ELEMENTS", 2 * TOKENS * WORDS)
    task = task_of(head_toys.causal)  # which knows of one sample's share that it is small
    assert [chunked(task, "auto", rows).count for rows in (1, SHARE, SHARE)] == [1, 2, 2]


def test_in_bfloat16_gradients_are_no_farther_from_the_exact_ones_than_in_one_go() -> None:
    exact_task, task = task_of(head_toys.causal), task_of(head_toys.causal)
    task.root.bfloat16()
    exact_task.root.load_state_dict(task.root.state_dict())
    exact_task.root.double()
    whole = exact_task.share_module(exact_task.ops[-1])
    hidden = arguments_of(task, torch.bfloat16)[-3].detach().double().requires_grad_()
    arguments = arguments_of(exact_task)
    arguments[-3] = hidden
    exact = passed(whole, whole, arguments)["head.weight"]
    errors = []
    for module in (task.share_module(task.ops[-1]), chunked(task, 1000).module):
        found = passed(module, module, arguments_of(task, torch.bfloat16))
        errors.append((found["head.weight"].double() - exact).abs().mean())
    assert errors[1] <= 1.2 * errors[0]


def test_a_second_backward_pass_is_refused() -> None:
    task = task_of(head_toys.causal)
    loss = chunked(task, 3).module(*arguments_of(task, torch.float32))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_more_than_a_chunk_of_logits_is_alive() -> None:
    """In one go the logits, their softmax and its gradient are; in chunks of a token a row of each."""
    task = task_of(head_toys.causal)
    peaks = []
    for module in (task.share_module(task.ops[-1]), chunked(task, 1000).module):
        arguments = arguments_of(task, torch.float32)
        with LiveBytes([each for each in arguments if isinstance(each, Tensor)]) as live:
            live.begin()
            before = live.held
            module(*arguments).backward()
            peaks.append(live.peak - before)
    logits = 4 * SHARE * TOKENS * WORDS
    assert peaks[0] - peaks[1] > logits


def test_recomputed_no_gradient_is_kept_from_forward_to_backward() -> None:
    task = task_of(head_toys.causal)
    module, arguments = chunked(task, 3).module, arguments_of(task, torch.float32)
    known = [*module.parameters(), *(each for each in arguments if isinstance(each, Tensor))]
    kept = []
    for run in (module, lambda *given: run_recomputed(module, given)):
        with LiveBytes(known) as live:
            before = live.held
            loss = run(*arguments)
            kept.append(live.held - before)
        del loss
    gradients = 4 * (WORDS * WIDTH + SHARE * TOKENS * WIDTH)
    assert kept[0] >= gradients
    assert kept[1] < gradients / 2


def test_chunks_that_are_alike_are_counted_as_if_each_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples of 7 tokens in parts of 3 and 4: one of each size, and the first, stand for all six."""
    task = task_of(head_toys.causal)
    op, train = task.ops[-1], TrainSettings(loss_chunks=4)
    sampled = (
        count_work(task, op, SHARE, "float32", loss_chunks=4),
        fake_memory(task, op, SHARE, "float32", train),
    )
    for module in (counting, fake_memories):
        monkeypatch.setattr(module, "sampled", lambda *_: nullcontext())
    each = (
        count_work(task, op, SHARE, "float32", loss_chunks=4),
        fake_memory(task, op, SHARE, "float32", train),
    )
    assert sampled[0].loss_chunks == 6
    # But for the sum of the scalars, a number of 4 bytes or two.
    found, expected = (memory.model_dump(exclude={"selective"}) for _, memory in (sampled, each))
    assert all(abs(found[key] - expected[key]) <= 8 for key in expected), (found, expected)
    assert Counter(sampled[0].forward) == Counter(each[0].forward)
    assert Counter(sampled[0].again) == Counter(each[0].again)
    assert sampled[0].backward == each[0].backward


def test_an_op_that_is_timed_runs_as_a_whole_batch_would() -> None:
    task = task_of(head_toys.causal)
    op = task.ops[-1]
    timed = timed_op(task, op, SHARE, 3)
    assert timed.loss_chunks == 3
    hidden = torch.randn(SHARE, TOKENS, WIDTH)
    fields = [batch_of()[name][:SHARE] for name in op.fields]
    assert timed.called(timed.module)(*fields, hidden).requires_grad
    assert timed_op(task, op, SHARE, 1).num_counts is None


def test_chunks_by_hand() -> None:
    # 6 rows of 10 elements, at most 25 in a chunk: two rows each.
    assert choose_chunks(60, 6, None, 25) == tuple(Chunk((a, a + 2)) for a in (0, 2, 4))
    # At most 7 of 8: 4 positions of 2 are cut into 2 parts.
    assert choose_chunks(48, 6, 4, 7)[:3] == (
        Chunk((0, 1), (0, 2)),
        Chunk((0, 1), (2, 4)),
        Chunk((1, 2), (0, 2)),
    )
    assert choose_chunks(48, 6, 4, 8) == tuple(Chunk((a, a + 1)) for a in range(6))
    assert choose_chunks(60, 6, 4, 60) == (Chunk((0, 6)),)
    assert choose_chunks(60, 6, None, 1) == tuple(Chunk((a, a + 1)) for a in range(6))


@given(
    rows=st.integers(1, 40),
    positions=st.none() | st.integers(1, 30),
    width=st.integers(1, 50),
    limit=st.integers(1, 5000),
)
def test_chunks_cover_every_position_once(rows: int, positions: int | None, width: int, limit: int) -> None:
    elements = rows * (positions or 1) * width
    chunks = choose_chunks(elements, rows, positions, limit)
    seen = [
        (row, position)
        for chunk in chunks
        for row in range(*chunk.rows)
        for position in range(*(chunk.positions or (0, positions or 1)))
    ]
    assert seen == [(row, position) for row in range(rows) for position in range(positions or 1)]
    for chunk in chunks:
        span = chunk.rows[1] - chunk.rows[0]
        part = (positions or 1) if chunk.positions is None else chunk.positions[1] - chunk.positions[0]
        assert span * part * width <= max(limit, width)
