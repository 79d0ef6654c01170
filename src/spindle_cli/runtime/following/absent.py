"""Say of a parameter that is shared out that it is not there, to code of the user's that reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# They ask for no values; neither does whatever is an attribute.
_WITHOUT_VALUES = {"__get__", "size", "numel", "dim", "ndimension", "nelement", "element_size", "stride"}
_WITHOUT_VALUES |= {"is_floating_point", "is_complex", "__hash__", "__len__", "register_hook"}


class RefusingWhatIsAbsent(TorchFunctionMode):
    """Inside, an operation on a tensor that has no memory raises RuntimeError; otherwise it would read memory
    that is not there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in _WITHOUT_VALUES:
            for item in pytree.tree_leaves((args, kwargs)):
                if isinstance(item, Tensor) and _is_absent(item):
                    raise RuntimeError(
                        f"a parameter of shape {list(item.shape)} is read that devices share out: between "
                        "its ops' passes it is not there; a checkpoint has it (at_checkpoint)"
                    )
        return func(*args, **(kwargs or {}))


def _is_absent(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_meta
    return is_plain and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
