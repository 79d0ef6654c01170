"""Which glue draws random numbers."""

from __future__ import annotations

from torch import fx, nn

_DRAWING = frozenset(
    {
        "alpha_dropout",
        "bernoulli",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_alpha_dropout",
        "multinomial",
        "normal",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "randperm",
        "rrelu",
    }
)


def draws_random_numbers(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node gives other values each time that it is computed."""
    if node.op == "call_module":
        return any(
            isinstance(part, nn.modules.dropout._DropoutNd | nn.RReLU) and part.training
            for part in root.get_submodule(str(node.target)).modules()
        )
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.rstrip("_") in _DRAWING and node.kwargs.get("training", True) is not False
