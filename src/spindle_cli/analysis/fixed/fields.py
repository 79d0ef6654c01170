"""Fields of a batch that are taken as the same in every sample, since code reads their values.

Which fields may be is seen on the dataset's first samples; each step checks it of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from spindle_cli.analysis.fixed.marks import fix, is_fixed, one_row
from spindle_cli.errors import WorkloadError

SEEN = 16  # samples that are looked at: labels of two samples may well be the same
_MOST_ENTRIES = 64  # of a sample: a grid, a few lengths; a text that happens to be the same is none


def with_fixed(
    samples: Mapping[str, Tensor], read: Collection[str], more: Callable[[], Mapping[str, Tensor]]
) -> dict[str, Tensor] | None:
    """The samples, with those fixed of the fields whose values are read that can be; None if none can be that
    is not.

    Args:
        samples: the first of a dataset, collated.
        read: names of fields that values come from.
        more: reads more of them.
    """
    if not any(name in samples and _may_be_fixed(samples[name]) for name in read):
        return None
    try:
        seen = more()
    except WorkloadError:  # samples of several lengths, which make no batch
        return None
    fixable = {
        name
        for name in read
        if name in samples and not is_fixed(samples[name]) and name in seen and _may_be_fixed(seen[name])
    }
    if not fixable:
        return None
    return {name: fix(value.clone()) if name in fixable else value for name, value in samples.items()}


def _may_be_fixed(field: Tensor) -> bool:
    if is_fixed(field) or field.is_floating_point() or field.is_complex() or field.dim() == 0:
        return False
    is_small = 0 < field[0].numel() <= _MOST_ENTRIES
    return is_small and torch.equal(field, field[:1].expand_as(field))


def same_in_every_sample(field: Tensor, name: str, shape: tuple[int, ...], row: tuple[int, ...]) -> None:
    """Check a field that is taken as the same in every sample.

    Args:
        field: of shape (samples, *shape).
        row: the entries of one, in order.

    Raises:
        WorkloadError: a sample has other values.
    """
    if is_fixed(field) or field.is_meta or isinstance(field, FakeTensor):
        return
    expected = torch.tensor(row, dtype=field.dtype, device=field.device).reshape(1, *shape)
    differs = (field != expected).reshape(field.shape[0], len(row)).any(1)  # there may be no sample
    if bool(differs.any()):
        raise unlike(name, field[int(differs.int().argmax())], row)


def unlike(name: str, sample: Tensor, row: tuple[int, ...]) -> WorkloadError:
    """What is said of a sample that has other values of a fixed field."""
    shown = _shown(sample.flatten().tolist())
    return WorkloadError(
        f"field {name!r} is {shown} in a sample, and {_shown(row)} in the dataset's first ones: its "
        "values are read by forward, so that it is taken as the same in every sample",
        hint="Give every sample the same (images of one size), a task for each kind of sample, or compute "
        "what depends on it in the dataset.",
    )


def _shown(row: Collection[int]) -> str:
    return f"[{', '.join(map(str, row))}]"


def add_checks(graph: fx.Graph, samples: Mapping[str, Tensor]) -> list[fx.Node]:
    """Let a trace check the fields that are fixed, by nodes that give None."""
    made: list[fx.Node] = []
    for node in list(graph.nodes):
        field = samples.get(str(node.target)) if node.op == "placeholder" else None
        row = None if field is None else one_row(field)
        if field is None or row is None:
            continue
        last = [placeholder for placeholder in graph.nodes if placeholder.op == "placeholder"][-1]
        with graph.inserting_after(last):
            arguments = (node, str(node.target), tuple(field.shape[1:]), row)
            check = graph.call_function(same_in_every_sample, arguments)
        check.meta["place"] = node.meta.get("place")
        made.append(check)
    return made


def is_check(node: fx.Node) -> bool:
    """Whether a node checks a fixed field."""
    return node.op == "call_function" and node.target is same_in_every_sample
