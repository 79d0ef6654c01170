"""What is left in a variable of the context, of a thread or of the environment, or in another file, is found
like what is left in an object: forward, operators and hooks do not tell each other anything by it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from spindle_cli.analysis.analyse import analyse
from spindle_cli.errors import WorkloadError
from spindle_cli.training.watch import Watch
from spindle_cli.workload.types import Task, Workload

from . import settings_elsewhere
from .settings_elsewhere import Settings
from .toy import WIDTH, Block, Items

OF_CONTEXT = ContextVar("OF_CONTEXT", default=1.0)
UNSET: ContextVar[float] = ContextVar("UNSET")
OF_THREAD = threading.local()
OF_THREAD.scale = 1.0


def read_context() -> float:
    return OF_CONTEXT.get()


def move_context() -> None:
    OF_CONTEXT.set(OF_CONTEXT.get() + 1.0)


def read_thread() -> float:
    return OF_THREAD.scale  # type: ignore[no-any-return]


def move_thread() -> None:
    OF_THREAD.scale += 1.0


def read_environment() -> float:
    return float(os.environ["SCALE_OF_A_LOSS"])


def read_environment_by_function() -> float:
    return float(os.getenv("SCALE_OF_A_LOSS", "1.0"))


def move_environment() -> None:
    os.environ["SCALE_OF_A_LOSS"] = str(float(os.environ["SCALE_OF_A_LOSS"]) + 1.0)


NAME = ("SCALE", "OF", "A", "LOSS")  # no code has the name as it is


def read_environment_by_parts() -> float:
    return float(os.environ["_".join(NAME)])


def move_environment_by_parts() -> None:
    os.environ["_".join(NAME)] = str(float(os.environ["_".join(NAME)]) + 1.0)


def read_file() -> float:
    return settings_elsewhere.SCALE


def read_entry() -> float:
    return settings_elsewhere.BOX["scale"]


def move_entry() -> None:
    settings_elsewhere.BOX["scale"] += 1.0


def read_class() -> float:
    return Settings.scale


def move_class() -> None:
    Settings.scale += 1.0


WAYS: dict[str, tuple[Callable[[], float], Callable[[], None], str]] = {
    "context": (read_context, move_context, "OF_CONTEXT"),
    "thread": (read_thread, move_thread, "scale"),
    "environment": (read_environment, move_environment, "SCALE_OF_A_LOSS"),
    "environment by function": (read_environment_by_function, move_environment, "SCALE_OF_A_LOSS"),
    "environment by parts": (read_environment_by_parts, move_environment_by_parts, "SCALE_OF_A_LOSS"),
    "another file": (read_file, settings_elsewhere.move, "SCALE"),
    "a dict of another file": (read_entry, move_entry, "scale"),
    "a class of another file": (read_class, move_class, "scale"),
}


@pytest.fixture(autouse=True)
def as_at_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SCALE_OF_A_LOSS", "1.0")
    monkeypatch.setattr(OF_THREAD, "scale", 1.0)
    monkeypatch.setattr(settings_elsewhere, "SCALE", 1.0)
    monkeypatch.setattr(Settings, "scale", 1.0)
    monkeypatch.setitem(settings_elsewhere.BOX, "scale", 1.0)
    token = OF_CONTEXT.set(1.0)
    yield
    OF_CONTEXT.reset(token)


class Layer(nn.Module):
    """An operator that reads or moves something, or both."""

    def __init__(
        self, read: Callable[[], float] | None = None, move: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self.linear, self.read, self.move = nn.Linear(WIDTH, WIDTH), read, move

    def forward(self, x: Tensor) -> Tensor:
        if self.move is not None:
            self.move()
        y: Tensor = self.linear(x)
        return y if self.read is None else y * self.read()


class Net(nn.Module):
    def __init__(self, run: Callable[[Net, Tensor], Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.run = nn.Sequential(*layers), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def workload(run: Callable[[Net, Tensor], Tensor], *layers: nn.Module) -> Workload:
    return Workload(
        "w", [Task("t", Net(run, *layers), 6, Items(x=(4, WIDTH)))], tuple({type(each) for each in layers})
    )


def refused(made: Workload) -> str:
    with pytest.raises(WorkloadError, match=r"test_left_elsewhere\.py:\d+: task 't'") as caught:
        analyse(made)
    return str(caught.value)


def loss(net: Net, x: Tensor) -> Tensor:
    return net.layers(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", WAYS)
def test_forward_does_not_compute_with_what_its_last_call_has_left(way: str) -> None:
    read, move, _ = WAYS[way]

    def run(net: Net, x: Tensor) -> Tensor:
        move()
        return loss(net, x) * read()

    assert "with what an earlier forward has left in" in refused(workload(run, Block()))
    assert read() == 1.0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by", ["an operator", "a hook"])
def test_forward_does_not_read_what_operators_leave(way: str, by: str) -> None:
    read, move, name = WAYS[way]
    layer = Layer(move=move) if by == "an operator" else Layer()
    if by == "a hook":
        layer.register_forward_hook(lambda *_: move())
    said = refused(workload(lambda net, x: loss(net, x) * read(), layer))
    assert f"forward reads {name} between operators, which an operator sets" in said
    assert read() == 1.0


@pytest.mark.parametrize("way", WAYS)
def test_operators_do_not_read_what_forward_leaves(way: str) -> None:
    read, move, name = WAYS[way]

    def run(net: Net, x: Tensor) -> Tensor:
        move()
        return loss(net, x)

    said = refused(workload(run, Layer(read)))
    left = "BOX" if way == "a dict of another file" else name
    assert f"{left} between operators, and 'layers.0' reads it" in said


@pytest.mark.parametrize("way", WAYS)
def test_operators_do_not_read_what_others_leave(way: str) -> None:
    read, move, _ = WAYS[way]
    said = refused(workload(loss, Layer(move=move), Layer(read)))
    assert "the forward of 'layers.0' leaves" in said and "which 'layers.1' of task 't' reads" in said


def test_what_is_bound_to_a_function_is_read_by_it() -> None:
    """`functools.partial` calls the function, which calls what it is given."""

    def call(read: Callable[[], float]) -> float:
        return read()

    said = refused(workload(loss, Layer(move=move_context), Layer(partial(call, read_context))))
    assert "the forward of 'layers.0' leaves" in said and "which 'layers.1' of task 't' reads" in said


@pytest.mark.parametrize("is_before", [False, True])
def test_what_a_layers_hook_reads_in_a_backward_pass_is_read_by_it(is_before: bool) -> None:
    layer = Layer()
    if is_before:
        layer.linear.register_full_backward_pre_hook(lambda _, out: tuple(read_context() * g for g in out))
    else:
        layer.linear.register_full_backward_hook(
            lambda _, given, __: tuple(read_context() * g for g in given)
        )
    said = refused(workload(loss, Layer(move=move_context), layer))
    assert "the forward of 'layers.0' leaves" in said and "which 'layers.1' of task 't' reads" in said


@pytest.mark.parametrize("way", WAYS)
def test_an_operator_that_goes_on_from_its_last_call_is_whole(way: str) -> None:
    read, move, _ = WAYS[way]
    ops = analyse(workload(loss, Block(), Layer(read, move))).tasks["t"].ops
    assert [op.coupled for op in ops] == [False, True]
    assert read() == 1.0


@pytest.mark.parametrize("way", WAYS)
def test_what_nobody_moves_or_nobody_reads_is_no_matter(way: str) -> None:
    read, move, _ = WAYS[way]
    made = workload(lambda net, x: loss(net, x) * read(), Block(), Layer(read))
    assert not any(op.coupled for op in analyse(made).tasks["t"].ops)
    made = workload(loss, Block(), Layer(move=move))
    analyse(made)
    assert read() == 1.0


def put_back(net: Net, x: Tensor) -> Tensor:
    token = UNSET.set(2.0)
    try:
        return loss(net, x) * UNSET.get()
    finally:
        UNSET.reset(token)


def never_put_back(net: Net, x: Tensor) -> Tensor:
    UNSET.set(UNSET.get(1.0) + 1.0)
    return loss(net, x)


def test_an_array_that_may_not_be_written_is_a_view_of_what_somebody_else_puts_back() -> None:
    counts = np.zeros(2)
    shown = counts.view()
    shown.flags.writeable = False

    def count() -> None:
        counts[0] += 1.0

    def read() -> float:
        return 1.0 + 0.0 * float(shown[1])

    analyse(workload(loss, Block(), Layer(read, count)))
    assert counts.tolist() == shown.tolist() == [0.0, 0.0]


def test_a_variable_of_the_context_without_a_value_has_none_afterwards() -> None:
    analyse(workload(put_back, Block()))
    assert UNSET.get(None) is None


def test_a_variable_of_the_context_that_nothing_takes_the_value_from_is_refused() -> None:
    assert "test_left_elsewhere.UNSET, a ContextVar" in refused(workload(never_put_back, Block()))


def _set_context() -> None:
    OF_CONTEXT.set(2.0)


def _set_thread() -> None:
    OF_THREAD.scale = 2.0


def _set_environment() -> None:
    os.environ["SCALE_OF_A_LOSS"] = "2.0"


SET: dict[str, tuple[Callable[[], Any], str]] = {
    "context": (_set_context, r"OF_CONTEXT, which .* with another content"),
    "thread": (_set_thread, r"OF_THREAD\.scale, which was 1\.0 .* and is 2\.0"),
    "environment": (_set_environment, r"os\.environ\.SCALE_OF_A_LOSS, which was b?'1\.0' .* is b?'2\.0'"),
}


@pytest.mark.parametrize("way", SET)
@pytest.mark.parametrize("in_operator", [False, True])
def test_a_change_from_outside_is_noticed(way: str, in_operator: bool) -> None:
    read, _, _ = WAYS[way]
    made = (
        workload(loss, Layer(read))
        if in_operator
        else workload(lambda net, x: loss(net, x) * read(), Block())
    )
    watch = Watch.of(made)
    watch.check(1)
    os.environ["UNREAD_BY_ALL"] = "1"
    try:
        watch.check(1)
    finally:
        del os.environ["UNREAD_BY_ALL"]
    change, said = SET[way]
    change()
    with pytest.raises(WorkloadError, match=said):
        watch.check(2)
