"""What an operation of torch writes to, by its schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

# Move their running statistics while training, of which their schemas say nothing.
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_STATISTICS = frozenset({"running_mean", "running_var"})


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that it writes to, in lists (torch._foreach_mul_) and by keyword (out=) too."""

    def given() -> Iterator[tuple[Any, Any]]:
        yield from zip(func._schema.arguments, args, strict=False)
        by_name = {argument.name: argument for argument in func._schema.arguments}
        yield from ((by_name[name], value) for name, value in kwargs.items() if name in by_name)

    moves = func._schema.name.removeprefix("aten::") in _BATCH_NORMS and any(
        value is True for argument, value in given() if argument.name == "training"
    )
    return [
        tensor
        for argument, value in given()
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (moves and argument.name in _STATISTICS)
        for tensor in pytree.tree_leaves(value)
        if isinstance(tensor, Tensor)
    ]
