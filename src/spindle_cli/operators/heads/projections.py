"""Where an op's graph uses rows of a vocabulary: projections onto it, and lookups in it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MATMUL = (operator.matmul, torch.matmul, "matmul")


@dataclass(frozen=True)
class Projection:
    """A linear map onto the words.

    Attributes:
        node: the call. `hidden`: what it maps, a node.
        weight, bias: dotted names; the words lie along dimension 0.
        words: how many.
    """

    node: fx.Node
    hidden: fx.Node
    weight: str
    bias: str | None
    words: int

    @property
    def parameters(self) -> tuple[str, ...]:
        """What it has of each word."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True)
class Lookup:
    """An embedding's call: `ids`, a node, and the word whose row takes no gradient."""

    node: fx.Node
    ids: fx.Node
    weight: str
    words: int
    padding: int | None

    @property
    def parameters(self) -> tuple[str, ...]:
        """What it has of each word."""
        return (self.weight,)


Use = Projection | Lookup


def uses_of_words(graph: fx.Graph, root: nn.Module) -> Iterator[Use]:
    """All projections and lookups of a graph, in its order."""
    for node in graph.nodes:
        use = _of_module(node, root) if node.op == "call_module" else _of_call(node, root)
        if use is not None:
            yield use


def _of_module(node: fx.Node, root: nn.Module) -> Use | None:
    module, name = root.get_submodule(str(node.target)), str(node.target)
    given = [*node.args, *node.kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], fx.Node) or any(getattr(module, h) for h in _HOOKS):
        return None
    if type(module) is nn.Linear:
        bias = None if module.bias is None else f"{name}.bias"
        return Projection(node, given[0], f"{name}.weight", bias, module.out_features)
    if type(module) is nn.Embedding:
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return None
        return Lookup(node, given[0], f"{name}.weight", module.num_embeddings, module.padding_idx)
    return None


def _of_call(node: fx.Node, root: nn.Module) -> Use | None:
    if node.op == "call_function" and node.target is functional.linear:
        return _of_linear(node, root)
    if node.op == "call_function" and node.target is functional.embedding:
        return _of_embedding(node, root)
    if node.op in ("call_function", "call_method") and node.target in _MATMUL and len(node.args) == 2:
        hidden, matrix = node.args
        weight = _transposed(matrix, root)
        if weight is not None and isinstance(hidden, fx.Node):
            return Projection(node, hidden, weight, None, _rows(weight, root))
    return None


def _of_linear(node: fx.Node, root: nn.Module) -> Projection | None:
    given = _bound(node, ("input", "weight", "bias"))
    hidden, weight, bias = (given.get(name) for name in ("input", "weight", "bias"))
    name = _parameter(weight, root)
    of_bias = None if bias is None else _parameter(bias, root)
    if name is None or not isinstance(hidden, fx.Node) or (bias is not None and of_bias is None):
        return None
    return Projection(node, hidden, name, of_bias, _rows(name, root))


def _of_embedding(node: fx.Node, root: nn.Module) -> Lookup | None:
    settings = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = _bound(node, ("input", "weight", *settings))
    name, ids = _parameter(given.get("weight"), root), given.get("input")
    changes = given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse")
    if name is None or not isinstance(ids, fx.Node) or changes:
        return None
    words, padding = _rows(name, root), given.get("padding_idx")
    return Lookup(node, ids, name, words, None if padding is None else padding % words)


def _bound(node: fx.Node, names: tuple[str, ...]) -> Mapping[str, Any]:
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _transposed(value: Any, root: nn.Module) -> str | None:
    """The parameter whose transpose a node gives."""
    if not isinstance(value, fx.Node) or not value.args:
        return None
    source, *how = value.args
    is_attribute = value.target is getattr and how in (["T"], ["mT"])
    swapped = ([0, 1], [1, 0], [-2, -1], [-1, -2])
    is_method = (value.target in ("t", torch.t) and not how) or (
        value.target in ("transpose", torch.transpose) and how in swapped
    )
    return _parameter(source, root) if is_attribute or is_method else None


def _parameter(value: Any, root: nn.Module) -> str | None:
    """The name of a matrix's or a vector's parameter that a node gives."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    owner, _, last = str(value.target).rpartition(".")
    held = getattr(root.get_submodule(owner), last)
    return str(value.target) if isinstance(held, nn.Parameter) and held.dim() in (1, 2) else None


def _rows(name: str, root: nn.Module) -> int:
    return int(root.get_parameter(name).shape[0])
