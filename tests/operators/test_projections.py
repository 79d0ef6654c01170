"""Which calls of a graph are heads and lookups whose words can be shared out, and which are not."""

from __future__ import annotations

from typing import Any

import head_toys
import pytest
from head_toys import WIDTH, WORDS, Writer
from torch import fx, nn
from torch.nn import functional

from spindle_cli.operators.heads.projections import Lookup, Projection, uses_of_words


@pytest.mark.parametrize("kind", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_an_embedding_whose_rows_depend_on_each_other_stays_whole(kind: str) -> None:
    model = Writer(head_toys.causal)
    model.embed = nn.Embedding(WORDS, WIDTH, **{kind: 1.0 if kind == "max_norm" else True})
    (uses, head) = used_in(model)
    assert (uses, head) == ([], ["head.weight"])


@pytest.mark.parametrize(
    "hook", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_a_head_with_hooks_stays_whole(hook: str) -> None:
    model = Writer(head_toys.causal)
    getattr(model.head, f"register_{hook}")(lambda *_: None)
    assert used_in(model) == (["embed.weight"], [])


def test_a_lookup_by_a_function_counts_its_padding_from_the_end() -> None:
    (use,) = uses_of_lookup(padding_idx=-2)
    assert isinstance(use, Lookup)
    assert (use.weight, use.words, use.padding) == ("embed.weight", WORDS, WORDS - 2)
    assert [getattr(use, "padding", -1) for use in uses_of_lookup()] == [None]
    assert [getattr(use, "padding", -1) for use in uses_of_lookup(padding_idx=0)] == [0]


@pytest.mark.parametrize("more", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_a_function_whose_rows_depend_on_each_other_stays_whole(more: dict[str, Any]) -> None:
    assert uses_of_lookup(**more) == []


def uses_of_lookup(**more: Any) -> list[Any]:
    """Of a graph that calls `functional.embedding` with the embedding's weight."""
    graph = fx.Graph()
    ids = graph.placeholder("ids")
    graph.output(graph.call_function(functional.embedding, (ids, graph.get_attr("embed.weight")), more))
    return list(uses_of_words(graph, Writer(head_toys.causal)))


def used_in(model: nn.Module) -> tuple[list[str], list[str]]:
    """The lookups and the projections over the words in a graph like a writer's."""
    graph = fx.Graph()
    ids = graph.placeholder("ids")
    graph.output(graph.call_module("head", (graph.call_module("embed", (ids,)),)))
    uses = list(uses_of_words(graph, model))
    kinds = (Lookup, Projection)
    return tuple([use.weight for use in uses if isinstance(use, kind)] for kind in kinds)  # type: ignore[return-value]
