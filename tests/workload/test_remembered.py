"""What is remembered of an operator is what it gives, and nothing is remembered of what may give another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.analysis.without_data import Remembering

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "sum of two": lambda x: x + x,
    "a whole number": lambda x: x.long() * 2,
    "a fraction": lambda x: x.long() * 2.0,
    "true": lambda x: x.long() + True,
    "half": lambda x: x.half().softmax(-1),
    "in strides of its input": lambda x: x.transpose(0, 2).exp(),
    "a product": lambda x: x @ x.transpose(1, 2),
    "several": lambda x: torch.native_layer_norm(x, (5,), None, None, 1e-5),
    "a mean": lambda x: x.mean(),
    "a list": lambda x: torch.split(x, 2, dim=1)[1] + 1,
    "a view": lambda x: x[:, 1:].transpose(1, 2),
    "a view of a view": lambda x: x[1:][:, 1].unsqueeze(0).expand(3, -1, -1),
    "as another dtype": lambda x: x.view(torch.int32),
    "flattened": lambda x: x.transpose(0, 1).flatten(),
    "joined": lambda x: torch.cat([x, x[:1]]),
    "stacked": lambda x: torch.stack([x, x], 1),
    "like it": lambda x: torch.zeros_like(x, dtype=torch.bool),
    "picked": lambda x: x[torch.zeros(2, 3, dtype=torch.long, device=x.device)],
    "its gradient": lambda x: torch.autograd.grad(functional.gelu(x).sum(), x)[0],
    "of a loss": lambda x: functional.cross_entropy(x[:, 0], torch.zeros(4, device=x.device).long()),
    "of complex numbers": lambda x: torch.complex(x, x).conj() + 1,
    "a linear layer": lambda x: functional.linear(x, x.new_empty(7, 5), x.new_empty(7)),
    "its gradients": lambda x: torch.autograd.grad(functional.linear(x, x.new_empty(7, 5)).sum(), x)[0],
    "of a norm": lambda x: torch.autograd.grad(functional.layer_norm(x, (5,)).sum(), x)[0],
    "normed channels": lambda x: functional.group_norm(x.transpose(1, 2), 5),
    "attended": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "convolved, channels last": lambda x: functional.conv2d(
        x[None].to(memory_format=torch.channels_last), x.new_empty(6, 4, 1, 1)
    ),
    "pooled": lambda x: functional.max_pool1d(x, 2, return_indices=True),
    "looked up": lambda x: functional.embedding(torch.ones(2, 3, dtype=torch.long, device=x.device), x[0]),
    "the largest": lambda x: x.topk(2, sorted=False),
    "in order": lambda x: x.transpose(0, 2).sort(stable=True),
    "summed up as": lambda x: x.half().sum((0, 2), keepdim=True, dtype=torch.float64),
    "where": lambda x: torch.where(x > 0, x.bfloat16(), x.new_zeros(())),
    "a number beside it": lambda x: x.half() * torch.empty((), dtype=torch.float64),
    "padded": lambda x: functional.pad(x, (1, 2, 0, 1), value=3.0),
    "repeated": lambda x: x.repeat(2, 1, 3).repeat_interleave(2, 1),
    "normed in eval mode": lambda x: torch.native_batch_norm(
        x, None, None, x.new_empty(3), x.new_empty(3), False, 0.1, 1e-5
    ),
    "a number elsewhere": lambda x: x.to("meta") * torch.empty(()),
    "elsewhere": lambda x: x.to("meta") + 1,
    "new elsewhere": lambda x: x.new_empty((2, 3), device="meta"),
}


class Run(TorchDispatchMode):
    """Notes what is run of torch's operators below what is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.empty_strided.default:  # makes what is remembered
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def remembering(device: str) -> Iterator[Run]:
    """Inside, tensors of the meta device or fake ones."""
    with ExitStack() as stack:
        if device == "fake":
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        seen = stack.enter_context(Run())
        stack.enter_context(Remembering())
        yield seen


def given(device: str, size: int = 4) -> Tensor:
    return torch.empty(size, 3, 5, device="meta" if device == "meta" else "cpu", requires_grad=True)


def described(value: Any) -> list[Any]:
    return [
        (
            t.shape,
            t.stride(),
            t.dtype,
            t.device,
            t.storage_offset(),
            t.requires_grad,
            t.untyped_storage().nbytes(),
        )
        for t in pytree.tree_leaves(value)
    ]


@pytest.mark.parametrize("device", ["meta", "fake"])
@pytest.mark.parametrize("name", CALLS)
def test_the_second_time_gives_what_the_first_and_torch_give(name: str, device: str) -> None:
    call = CALLS[name]
    with FakeTensorMode() if device == "fake" else ExitStack():
        plain = described(call(given(device)))
    for _ in range(2):
        with remembering(device):
            assert described(call(given(device))) == plain


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_what_is_remembered_is_not_run_again_and_is_another_tensor(device: str) -> None:
    with remembering(device) as seen:
        x = given(device, 11).detach()
        first = torch.empty_like(x)
        ran = len(seen.names)
        second = torch.empty_like(x)
        assert seen.names[ran:] == []
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
        assert torch.empty_like(x, dtype=torch.half).shape == second.shape
        assert seen.names[ran:] == ["empty_like"]


def test_the_mode_of_fake_tensors_takes_nothing_apart_that_has_a_kernel() -> None:
    with remembering("fake") as seen:
        x = given("fake", 6).detach()
        weight = torch.empty(7, 5)
        ran = len(seen.names)
        out = functional.linear(x, weight).flatten(1)
        assert (out.shape, out.device.type, type(out)) == ((6, 21), "cpu", FakeTensor)
        assert seen.names[ran:] == []


def test_a_view_has_the_strides_that_it_has_of_a_tensor_with_values() -> None:
    """Also along dimensions of one element, for which torch's fake tensors keep other strides."""
    shapes = ((1, 4, 16, 4), (4, 16, 4), (64, 4), (1, 1, 256))
    cut = torch.empty(2, 6, 4, 16, 4)[:1, 2]
    with remembering("fake"):
        fake = torch.empty(2, 6, 4, 16, 4)[:1, 2]
        found = [fake.view(shape).stride() for shape in shapes]
    assert found == [cut.view(shape).stride() for shape in shapes]


def test_what_does_not_fit_fails_as_in_the_mode_of_fake_tensors_and_leaves_nothing_behind() -> None:
    def fail() -> str:
        with pytest.raises(RuntimeError) as failed:
            given("fake").detach() + torch.empty(4, 6, 5)
        return str(failed.value)

    with FakeTensorMode():
        plain = fail()
    with remembering("fake"):
        assert fail() == plain
        assert (given("fake").detach() + 1).shape == (4, 3, 5), "and what comes next does not"


def test_a_view_lies_in_the_memory_of_what_it_was_taken_of_this_time() -> None:
    with remembering("fake"):
        for _ in range(2):
            x = given("fake").detach()
            view = x[:, 1:2].transpose(0, 1)
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert view[1:].numel() == 0
            assert x[1:][1:].storage_offset() == 30
            assert [x[number][0].storage_offset() for number in range(4)] == [0, 15, 30, 45]
            assert torch.ops.aten._unsafe_view(x, [60]).untyped_storage()._cdata == x.untyped_storage()._cdata


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_what_writes_is_run(device: str) -> None:
    with remembering(device) as seen:
        x = given(device).detach()
        for _ in range(2):
            seen.names.clear()
            before = x._version
            assert x.add_(1) is x
            torch.add(x, 1, out=x)
            assert x._version == before + 2
            assert seen.names == ["add_", "add"]


def test_real_tensors_and_values_are_left_to_torch() -> None:
    with remembering("meta"):
        for number in (1.0, 2.0):
            assert (torch.full((2,), number) * 2).tolist() == [2 * number] * 2
    with remembering("fake"):
        for _ in range(2):
            with pytest.raises(Exception, match="nonzero"):
                given("fake").nonzero()


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_strides_tell_calls_apart(device: str) -> None:
    with remembering(device):
        square = torch.empty(3, 3, device="meta" if device == "meta" else "cpu")
        for _ in range(2):
            assert square.exp().stride() == (3, 1)
            assert square.t().exp().stride() == (1, 3)


def test_sizes_numbers_and_the_default_dtype_tell_calls_apart() -> None:
    with remembering("fake"):
        for size in (2, 4):
            assert given("fake", size).sum(1).shape == (size, 5)
        whole = given("fake").long()
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            try:
                assert (whole / 2).dtype == dtype
            finally:
                torch.set_default_dtype(torch.float32)
    for _ in range(2):  # tensors of one mode are not handed to another
        with FakeTensorMode() as mode, Remembering():
            made = torch.empty(2) + 1
            assert made.fake_mode is mode
