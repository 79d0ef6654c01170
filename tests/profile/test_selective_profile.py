"""What profiles say of ops that are recomputed but for what takes longest."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from spindle_cli.profile.fit import op_memory, selective_share
from spindle_cli.profile.measuring.worker import measure_selective
from spindle_cli.profile.mixed.merging import _most
from spindle_cli.profile.op.op_memory import LEAST_SELECTED_BYTES, may_select, with_selective
from spindle_cli.profile.op.op_run import OpRun, WallClock
from spindle_cli.profile.profiling import Audience, estimate_profile
from spindle_cli.profile.types import OpMemory, SelectiveMemory, ShareMemory

WIDTH = 512  # so that products take nearly all of the time


class Feed(nn.Module):
    """A feed-forward layer; `changes`: what it gets from its first map, before the activation."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(functional.gelu(self.change(self.up(self.norm(x)))))
        return out


def measured(module: nn.Module, samples: int = 256) -> tuple[ShareMemory, ShareMemory]:
    """What it takes where nothing is recomputed, and with what was found."""
    torch.manual_seed(0)
    run = OpRun(module, [torch.randn(samples, WIDTH, requires_grad=True)], num_fields=0, clock=WallClock())
    memory = run.memory()
    return memory, measure_selective(run, memory)


def test_of_a_layer_it_is_measured_what_is_kept_and_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept whole: what is normalised, both of GELU's sides, and the output; in part what the first map gives
    and the output. Whatever time that takes on a busy machine.
    """
    monkeypatch.setattr("spindle_cli.profile.op.op_memory._MOST_AGAIN", 1.0)
    memory, found = measured(Feed())
    assert found.selective is not None
    floats = 4 * 256 * WIDTH
    assert found.selective.kept_bytes == pytest.approx(floats * (4 + 1), rel=0.05)
    assert memory.kept_bytes == pytest.approx(floats * (1 + 4 + 4 + 1), rel=0.05)
    assert 0 <= found.selective.share <= 1
    assert found.model_copy(update={"selective": None}) == memory


def test_a_small_share_is_left_out() -> None:
    memory, found = measured(Feed(), samples=8)
    assert memory.kept_bytes < LEAST_SELECTED_BYTES
    assert found is memory


def test_what_changes_in_place_what_would_be_kept_is_left_out() -> None:
    memory, found = measured(Feed(lambda x: x.mul_(2.0)))
    assert found is memory


class Forces(Feed):
    def forward(self, x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return found


def test_what_asks_for_gradients_itself_is_left_out() -> None:
    memory, found = measured(Forces())
    assert memory.kept_bytes >= LEAST_SELECTED_BYTES
    assert found is memory


class Counting(Feed):
    """Computes something else each time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * (1 + self.calls % 2))


def test_what_computes_something_else_the_second_time_is_left_out() -> None:
    memory, found = measured(Counting())
    assert found is memory


@pytest.mark.parametrize(
    ("kept", "share", "is_worth_it"),
    [(0.9, 0.6, True), (0.91, 0.1, False), (0.5, 0.61, False), (0.1, 0.0, True)],
)
def test_it_has_to_save_a_tenth_for_at_most_so_much_of_a_forward_pass(
    kept: float, share: float, is_worth_it: bool
) -> None:
    memory = ShareMemory(
        kept_bytes=LEAST_SELECTED_BYTES,
        forward_bytes=LEAST_SELECTED_BYTES,
        backward_bytes=0,
        first_backward_bytes=0,
    )
    selective = SelectiveMemory(kept_bytes=int(kept * LEAST_SELECTED_BYTES), share=share)
    assert with_selective(memory, selective).selective == (selective if is_worth_it else None)
    less = memory.model_copy(update={"kept_bytes": LEAST_SELECTED_BYTES - 1})
    assert with_selective(less, SelectiveMemory(kept_bytes=0, share=0.0)).selective is None


class Op:
    def __init__(self, **settings: Any) -> None:
        self.talks = self.coupled = False
        self.changes: tuple[str, ...] = ()
        vars(self).update(settings)


@pytest.mark.parametrize(
    ("op", "asked", "may"),
    [
        ({}, {}, True),
        ({"talks": True}, {}, False),
        ({"coupled": True}, {}, False),
        ({"changes": ("weight",)}, {}, False),
        ({}, {"is_split": True}, False),
        ({}, {"sums_shares": True}, False),
        ({}, {"loss_chunks": 2}, False),
    ],
)
def test_only_what_computes_on_its_own_device_is_looked_at(
    op: dict[str, Any], asked: dict[str, Any], may: bool
) -> None:
    settings = {"is_split": False, "sums_shares": False, "loss_chunks": 1} | asked
    assert may_select(Op(**op), **settings) is may  # type: ignore[arg-type]


def share(kept: int, selective: int | None, again: float = 0.5) -> ShareMemory:
    found = None if selective is None else SelectiveMemory(kept_bytes=selective, share=again)
    return ShareMemory(
        kept_bytes=kept, forward_bytes=kept, backward_bytes=0, first_backward_bytes=0, selective=found
    )


def test_bytes_are_linear_in_the_samples_and_the_largest_share_says_what_runs_again() -> None:
    """From 2 and 4 of 8 samples: 10 in any case and 5 each. Of one share alone as much in any case as where
    nothing is recomputed, here 0 and 40.
    """
    shares = [(2, share(100, 20, 0.5)), (4, share(200, 30, 0.25))]
    (entry,) = op_memory([shares], 1, 8)
    assert entry.selective_bytes == (10, 40)
    assert selective_share([shares]) == 0.25
    one = [(1, share(50, None)), (4, share(200, 32, 0.1))]
    (entry,) = op_memory([one], 1, 8)
    assert entry.selective_bytes == (0, 64)
    assert selective_share([shares, one]) == pytest.approx((0.25 + 0.1) / 2)
    (entry,) = op_memory([[(1, share(80, None)), (4, share(200, 100))]], 1, 8)
    assert entry.kept_bytes == (40, 320)
    assert entry.selective_bytes == (40, 120)
    (entry,) = op_memory([[(1, share(80, None)), (4, share(200, 30))]], 1, 8)
    assert entry.selective_bytes == (30, 0)


def test_of_ops_of_one_of_which_it_is_not_known_it_is_not_known() -> None:
    unknown = [(4, share(200, None))]
    first, second = op_memory([[(4, share(200, 32))], unknown], 1, 8)
    assert (first.selective_bytes, second.selective_bytes) == ((0, 64), None)
    assert selective_share([[(4, share(200, 32))], unknown]) is None
    assert selective_share([]) is None


def test_merged_profiles_say_the_most_if_both_know() -> None:
    (one,) = op_memory([[(4, share(200, 32))]], 1, 8)
    (other,) = op_memory([[(4, share(100, 40))]], 1, 8)
    (neither,) = op_memory([[(4, share(100, None))]], 1, 8)

    def most(*entries: OpMemory) -> tuple[int, int] | None:
        (found,) = _most([[entry] for entry in entries])
        return found.selective_bytes

    assert most(one, other) == (0, 80)
    assert most(one, neither) is None
    assert most(neither, one) is None


@pytest.mark.parametrize("train", [{}, {"compile": True}])
def test_an_estimate_says_it_without_running_anything(train: dict[str, Any], tmp_path: Path) -> None:
    """Of 4096 samples in two bytes, the output and what the first map gives: 64 and 256; whole also what is
    normalised and both of GELU's sides. What changes in place what would be kept is left out, and all that
    is compiled.
    """
    source = tmp_path / "workload.yaml"
    model = str(Path(__file__).parent / "feeds_workload.py") + ":build"
    source.write_text(yaml.safe_dump({"schema": "spindle.workload/1", "model": model, "train": train}))
    nobody = Audience(Console(file=io.StringIO()), lambda _: None)
    made = estimate_profile(str(source), tmp_path / "p.json", nobody, device_name="a800-80gb", num_devices=2)
    feed, change = made.by_name["feed/layers"], made.by_name["change/layers"]
    assert change.selective_share is None
    assert {entry.selective_bytes for entry in change.memory} == {None}
    if train:
        assert feed.selective_share is None
        return
    assert feed.selective_share is not None
    assert 0.05 < feed.selective_share < 0.6
    inner = feed.memory[1]
    assert inner.selective_bytes is not None
    assert inner.selective_bytes[1] == pytest.approx(2 * 4096 * (64 + 256), rel=0.02)
    assert inner.kept_bytes[1] == pytest.approx(2 * 4096 * (64 + 64 + 2 * 256), rel=0.05)
