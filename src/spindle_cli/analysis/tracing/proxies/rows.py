"""What works through the samples of a batch one after another, and is the same as one operation on all.

`torch.cat(list(x))` takes a batch apart and joins it again; `x.masked_scatter(mask, values)` fills the places
of one sample after those of the one before it. A share of the batch has fewer samples; as one operation on
each sample they are the same for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from spindle_cli.analysis.fixed.refusal import FRAMES, ReadsValuesError
from spindle_cli.workload.refuse import refusal

_ROW = "row"  # key of a node's meta: which sample's part of which node it is


def rows_of(batch: fx.Proxy, samples: int) -> Iterator[fx.Proxy]:
    """The parts of a traced batch, one for each sample."""
    parts: Any = batch
    for position in range(samples):
        row = parts[position]
        row.node.meta[_ROW] = (batch.node, position, samples)
        yield row


def joined_again(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[fx.Node, bool] | None:
    """The batch whose parts are joined, all of them in their order, and whether by torch.stack; None where
    something else is called.
    """
    if target not in (torch.cat, torch.stack, torch.concat, torch.concatenate) or not args:
        return None
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    parts = args[0]
    if dim != 0 or not isinstance(parts, list | tuple) or not parts:
        return None
    rows = [part.meta.get(_ROW) if isinstance(part, fx.Node) else None for part in parts]
    batch: fx.Node | None = rows[0][0] if rows[0] is not None else None
    if batch is None or rows != [(batch, position, len(parts)) for position in range(len(parts))]:
        return None
    return batch, target is torch.stack


def divided_and_joined(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> fx.Node | None:
    """What is split along a dimension and joined again along it, whatever the sizes of its parts; None where
    something else is called.
    """
    if target not in (torch.cat, torch.concat, torch.concatenate) or not args:
        return None
    parts = args[0]
    if not isinstance(parts, fx.Node) or parts.target not in (torch.split, "split"):
        return None
    dims = [
        given[place] if len(given) > place else named.get("dim", 0)
        for given, named, place in ((parts.args, parts.kwargs, 2), (args, kwargs, 1))
    ]
    whole = parts.args[0] if parts.args else None
    return whole if dims[0] == dims[1] and isinstance(whole, fx.Node) else None


def check_rows(task: str, graph: fx.Graph) -> None:
    """Refuse samples that are worked through one after another otherwise.

    Args:
        graph: without dead code.

    Raises:
        WorkloadError: with the place in the user's code.
    """
    for node in graph.nodes:
        if _ROW in node.meta:
            made = refusal(
                task,
                "forward decides by the size of the batch, which a share of the batch does not have: it "
                "works through the samples one after another",
                node.meta.get("place"),
                "Compute with all samples at once.",
            )
            raise ReadsValuesError.at(made, frames=node.meta.get(FRAMES, ()))


def filled_by_sample(tensor: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """`tensor.masked_scatter(mask, values)` where each sample has as many places as values.

    Args:
        tensor: of shape (samples, ...).
        mask: broadcast to it; where it is true, values are put.
        values: of shape (samples * rows, ...), each sample's rows together.

    Raises:
        RuntimeError: a sample has more or fewer places than values (on a GPU, an assertion of the device).
    """
    samples = tensor.shape[0]
    places = mask.expand_as(tensor).reshape(samples, -1)
    given = values.reshape(samples, -1)
    fits = (places.sum(1) == given.shape[1]).all()
    torch._assert_async(  # type: ignore[no-untyped-call,unused-ignore]  # torch: untyped
        fits, "masked_scatter: a sample has more or fewer places than values, so that others would get them"
    )
    order = (places.long().cumsum(1) - 1).clamp(min=0, max=given.shape[1] - 1)
    return torch.where(places, given.to(tensor.dtype).gather(1, order), tensor.reshape(samples, -1)).view_as(
        tensor
    )
