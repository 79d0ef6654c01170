"""Nodes that only ask a tensor for something that others can tell as well: the batch's size, a dtype, a
device.
"""

from __future__ import annotations

import builtins
from typing import Literal

import torch
from torch import Tensor, fx

from spindle_cli.analysis.tracing.shapes import Shapes

Question = Literal["size", "dtype", "device"]


def question_of(node: fx.Node, shapes: Shapes) -> Question | None:
    """What a node asks for; None if it is no question."""
    if node.op not in ("call_function", "call_method"):
        return None
    value, doubled = shapes.values[node], shapes.doubled[node]
    if isinstance(value, torch.dtype):
        return "dtype"
    if isinstance(value, torch.device):
        return "device"
    is_size = type(value) is int and (value, doubled) == (shapes.batch_size, 2 * shapes.batch_size)
    return "size" if is_size else None


def can_answer(question: fx.Node, tensor: fx.Node, shapes: Shapes) -> bool:
    """Whether a tensor has the answer to a question."""
    if not isinstance(shapes.values[tensor], Tensor):
        return False
    kind = question_of(question, shapes)
    if kind == "size":
        batch = shapes.batch_dim(tensor)
        return batch.dim is not None and batch.rows == 1
    return kind == "device" or shapes.values[tensor].dtype == shapes.values[question]


def ask(graph: fx.Graph, question: fx.Node, copy: fx.Node, tensor: fx.Node, shapes: Shapes) -> fx.Node:
    """Put the question into a graph that holds a copy of `tensor`, which can answer it."""
    kind = question_of(question, shapes)
    if kind == "size":
        return graph.call_method("size", (copy, shapes.batch_dim(tensor).dim))
    return graph.call_function(builtins.getattr, (copy, kind))
