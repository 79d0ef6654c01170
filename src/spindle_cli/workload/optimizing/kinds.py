"""Kinds of parameters that rules name in one word, and classes of the modules that hold them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from spindle_cli.workload.building.source import settled_module_name
from spindle_cli.workload.settings.groups import Kind

# Told by the names of classes, as those of other libraries derive from none of torch's:
# LayerNorm, BatchNorm2d, LlamaRMSNorm; Embedding, EmbeddingBag, BertEmbeddings.
_NORM = re.compile(r"norm(\d?d)?$", re.IGNORECASE)
_EMBEDDING = re.compile(r"embeddings?(bag)?$", re.IGNORECASE)


def is_of_class(module: nn.Module, wanted: Iterable[str]) -> bool:
    """Whether a module is of one of these classes, or of one derived from them.

    `wanted`: names, or 'package.module:Name'. A workload file's own module is called as its file.
    """
    known = {name for found in type(module).__mro__ for name in _names_of(found)}
    return any(name in known for name in wanted)


def _names_of(found: type) -> tuple[str, str]:
    return found.__name__, f"{settled_module_name(found.__module__)}:{found.__qualname__}"


def is_of_kind(
    kind: Kind, names: Sequence[str], owners: Sequence[nn.Module], parameter: nn.Parameter
) -> bool:
    """Whether a parameter is of a kind.

    Args:
        names: all that it has.
        owners: the modules that have it; with one embedding among them (tied weights) it is one.
    """
    match kind:
        case "norms":
            return any(_is_called(owner, _NORM) for owner in owners)
        case "biases":
            return any(_is_bias(name.rpartition(".")[2]) for name in names)
        case "embeddings":
            return any(_is_called(owner, _EMBEDDING) for owner in owners)
        case "matrices":
            return parameter.dim() == 2 and not is_of_kind("embeddings", names, owners, parameter)
        case "vectors":
            return parameter.dim() < 2


def _is_called(module: nn.Module, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(found.__name__) for found in type(module).__mro__ if found is not nn.Module)


def _is_bias(name: str) -> bool:
    """`bias`, `in_proj_bias`, `bias_hh_l0`."""
    return name == "bias" or name.endswith("_bias") or name.startswith("bias_")
