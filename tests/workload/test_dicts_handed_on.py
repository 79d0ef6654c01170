"""What forward may do with dicts, lists and tuples that operators give: all that it may do with its own."""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task, Workload
from workload.shares import run_plain, run_shares

from .toy import WIDTH, Items

BATCH = 5


class Pair(NamedTuple):
    hidden: Tensor
    pooled: Tensor
    extra: Tensor | None


class Key(enum.Enum):
    A = 1


class Own(OrderedDict[str, Any]):
    """Copied into a module's arguments as it is."""


torch.utils._pytree.register_pytree_node(
    Own,
    lambda own: (list(own.values()), list(own)),
    lambda values, names: Own(zip(names, values, strict=True)),
)


class Encoder(nn.Module):
    """Gives its two tensors, and what it has not, in a container of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind
        self.register_buffer("kept", torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> Any:
        hidden = self.linear(x)
        named = {"hidden": hidden, "pooled": hidden.mean(1), "extra": None}
        kinds: dict[str, Callable[[], Any]] = {
            "dict": lambda: named,
            "ordered": lambda: OrderedDict(named),
            "with a default": lambda: defaultdict(list, named),
            "tuple": lambda: tuple(named.values()),
            "list": lambda: list(named.values()),
            "named": lambda: Pair(**named),
            "with what it was given": lambda: {**named, "given": x},
            "nested": lambda: {"first": (named, [hidden])},
            "one tensor twice": lambda: {**named, "same": hidden},
            "with a view": lambda: {**named, "row": hidden[:, 0]},
            "with a buffer": lambda: {**named, "own": self.kept},
            "with what is no tensor": lambda: {**named, "sizes": hidden.shape, "dtype": hidden.dtype, "n": 3},
            "with the batch's size": lambda: {**named, "n": len(hidden)},
            "with the number of rows": lambda: {**named, "n": 4 * len(hidden)},
            "by members of an enum": lambda: {Key.A: hidden, "pooled": named["pooled"]},
            "unknown to torch": lambda: UserDict(named),
            "of a class of its own": lambda: Own(named),
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
    "names of one with a default": ("with a default", lambda given: _summed(given[name] for name in given)),
    "put into one with a default": ("with a default", _put),
    "asked for a name, in one of its own class": (
        "of a class of its own",
        lambda given: given["pooled"] * (2 if "hidden" in given else 3),
    ),
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


class Reader(nn.Module):
    """Takes an encoder's whole dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[Any, Any]) -> Tensor:
        row: Tensor = self.linear(given["pooled"])
        return row * given.get("sizes", (0, 4))[1] / given.get("n", 3)


class Chain(Net):
    def __init__(self, kind: str) -> None:
        reader = Reader()
        super().__init__(kind, reader)
        self.reader = reader


@pytest.mark.parametrize("kind", ["with what is no tensor", "with the batch's size"])
def test_a_dict_with_sizes_and_dtypes_goes_whole_to_another_operator(kind: str) -> None:
    task = Task("t", Chain(kind), BATCH, Items(x=(4, WIDTH)))
    graph = analysed(Workload("w", [task], (Encoder, Reader))).tasks["t"]
    assert len(graph.ops) == 2
    batch = {"x": torch.randn(BATCH, 4, WIDTH)}
    shares = {op.index: 2 for op in graph.ops}
    torch.testing.assert_close(run_shares(graph, batch, shares), run_plain(task, batch))


class NamedReader(nn.Module):
    """Takes an encoder's named tuple with another entry."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Tensor:
        row: Tensor = self.linear(given.pooled)
        return row if given.extra is None else row * 2


def test_a_named_tuple_with_another_entry_goes_whole_to_another_operator() -> None:
    reader = NamedReader()
    net = Net("named", lambda given: reader(given._replace(pooled=given.pooled * 2)))
    net.reader = reader
    task = Task("t", net, BATCH, Items(x=(4, WIDTH)))
    graph = analysed(Workload("w", [task], (Encoder, NamedReader))).tasks["t"]
    batch = {"x": torch.randn(BATCH, 4, WIDTH)}
    torch.testing.assert_close(run_shares(graph, batch, {0: 2, 1: 2}), run_plain(task, batch))


def test_a_number_that_an_operator_makes_of_the_batch_is_refused_in_another() -> None:
    task = Task("t", Chain("with the number of rows"), BATCH, Items(x=(4, WIDTH)))
    with pytest.raises(WorkloadError, match=r"test_dicts_handed_on.py.*goes to another op, and is a dict"):
        analysed(Workload("w", [task], (Encoder, Reader)))


def test_a_dict_by_keys_that_no_code_is_written_with_is_refused_where_it_goes_whole_to_another() -> None:
    task = Task("t", Chain("by members of an enum"), BATCH, Items(x=(4, WIDTH)))
    with pytest.raises(WorkloadError, match=r"test_dicts_handed_on.py.*'use' is given a dict with the key"):
        analysed(Workload("w", [task], (Encoder, Reader)))


def test_a_change_of_what_an_operator_was_given_and_gives_again_is_refused() -> None:
    class Changing(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            given = self.encoder(x)
            x += 1
            return (given["pooled"] + given["given"].mean(1)).pow(2).mean()

    net = Changing("with what it was given", _summed)
    with pytest.raises(WorkloadError, match=r"test_dicts_handed_on.py.*in place"):
        analysed(Workload("w", [Task("t", net, BATCH, Items(x=(4, WIDTH)))], (Encoder,)))


def _changed(name: str, other: str) -> Callable[[Any], Tensor]:
    def use(given: Any) -> Tensor:
        given[name] += 1
        found: Tensor = given["pooled"] + given[other].mean()
        return found

    return use


REFUSED: dict[str, tuple[str, Callable[[Any], Tensor], str]] = {
    "a tensor under two names": ("one tensor twice", _changed("hidden", "same"), "in place"),
    "a tensor with a view of it": ("with a view", _changed("hidden", "row"), "in place"),
    "a view of a tensor": ("with a view", _changed("row", "hidden"), "in place"),
    "what the operator keeps": ("with a buffer", _changed("own", "own"), "in place"),
    "one that torch does not look into": ("unknown to torch", lambda given: given["pooled"], "a UserDict"),
    "one of a class of its own": (
        "of a class of its own",
        lambda given: given.update(own=given["pooled"]) or given["own"],
        "calls update of a Own",
    ),
    "an attribute of one of a class of its own": (
        "of a class of its own",
        lambda given: setattr(given, "extra", 3) or given["pooled"],
        "calls setattr",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trace_cannot_keep_of_a_change_is_refused(name: str) -> None:
    kind, use, why = REFUSED[name]
    with pytest.raises(WorkloadError, match=f"test_dicts_handed_on.py.*{why}"):
        analysed(Workload("w", [Task("t", Net(kind, use), BATCH, Items(x=(4, WIDTH)))], (Encoder,)))
