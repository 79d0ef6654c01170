"""What forward may do with dicts, lists and tuples that operators give: all that it may do with its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.workload.types import Task, Workload
from workload.shares import run_plain, run_shares

from .toy import WIDTH, Items

BATCH = 5


class Pair(NamedTuple):
    hidden: Tensor
    pooled: Tensor
    extra: Tensor | None


class Encoder(nn.Module):
    """Gives its two tensors, and what it has not, in a container of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Tensor) -> Any:
        hidden = self.linear(x)
        named = {"hidden": hidden, "pooled": hidden.mean(1), "extra": None}
        kinds: dict[str, Callable[[], Any]] = {
            "dict": lambda: named,
            "ordered": lambda: OrderedDict(named),
            "tuple": lambda: tuple(named.values()),
            "list": lambda: list(named.values()),
            "named": lambda: Pair(**named),
            "nested": lambda: {"first": (named, [hidden])},
        }
        return kinds[self.kind]()


class Net(nn.Module):
    def __init__(self, kind: str, use: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.encoder, self.use = Encoder(kind), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.encoder(x)).pow(2).mean()


def _summed(items: Any) -> Tensor:
    found: Tensor = sum(item.mean(1) if item.dim() == 3 else item for item in items if item is not None)  # type: ignore[assignment]
    return found


def _named(hidden: Tensor, pooled: Tensor, extra: Tensor | None) -> Tensor:
    return hidden.mean(1) * 2 + pooled if extra is None else extra


def _put(given: dict[str, Any]) -> Tensor:
    given["scaled"] = given["pooled"] * 3
    return given["scaled"] + given["hidden"].mean(1)  # type: ignore[no-any-return]


def _taken(given: dict[str, Any]) -> Tensor:
    hidden = given.pop("hidden")
    given.update(own=hidden.mean(1) * 2)
    return _summed(given.values())


def _unpacked(given: Any) -> Tensor:
    hidden, pooled, extra = given
    return _named(hidden, pooled, extra)


USES: dict[str, tuple[str, Callable[[Any], Tensor]]] = {
    "items": ("dict", lambda given: _summed(value for _, value in given.items())),
    "values of an ordered one": ("ordered", lambda given: _summed(given.values())),
    "names": ("dict", lambda given: _summed(given[name] for name in given)),
    "as arguments": ("dict", lambda given: _named(**given)),
    "merged": ("dict", lambda given: _summed({**given, "own": given["pooled"] * 2}.values())),
    "asked for a name": ("dict", lambda given: given["pooled"] * (2 if "hidden" in given else 3)),
    "asked for a name that is not there": ("dict", lambda given: given.get("none", given["pooled"])),
    "put into": ("dict", _put),
    "taken out of": ("dict", _taken),
    "asked what it is": ("dict", lambda given: given["pooled"] if isinstance(given, dict) else given),
    "a tuple asked what it is": ("tuple", lambda given: given[1] if isinstance(given, tuple) else given),
    "a tuple unpacked": ("tuple", _unpacked),
    "a list added to": ("list", lambda given: _summed([*given, given[1] * 2])),
    "a named tuple": ("named", lambda given: _named(**given._asdict())),
    "a named tuple with another entry": ("named", lambda given: _summed(given._replace(pooled=given[1] * 2))),
    "one in another": ("nested", lambda given: _summed([*given["first"][0].values(), *given["first"][1]])),
}


@pytest.mark.parametrize("name", USES)
def test_what_an_operator_gives_in_a_container_is_used_as_python_uses_it(name: str) -> None:
    torch.manual_seed(2)
    task = Task("t", Net(*USES[name]), BATCH, Items(x=(4, WIDTH)))
    graph = analysed(Workload("w", [task], (Encoder,)))
    assert not any(op.coupled for op in graph.tasks["t"].ops)
    batch = {"x": torch.randn(BATCH, 4, WIDTH)}
    shares = {op.index: 2 for op in graph.tasks["t"].ops}
    torch.testing.assert_close(run_shares(graph.tasks["t"], batch, shares), run_plain(task, batch))
