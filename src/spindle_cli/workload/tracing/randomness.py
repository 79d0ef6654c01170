"""Which code draws random numbers."""

from __future__ import annotations

from torch import fx, nn

# Names of functions and methods of torch, without the underscore of those that work in place.
DRAWING_FUNCTIONS = frozenset(
    {
        "_sample_dirichlet",
        "_standard_gamma",
        "alpha_dropout",
        "bernoulli",
        "binomial",
        "cauchy",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "exponential",
        "feature_alpha_dropout",
        "feature_dropout",
        "geometric",
        "log_normal",
        "multinomial",
        "normal",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random",
        "randperm",
        "rrelu",
        "uniform",
    }
)


def draws_random_numbers(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node gives other values each time that it is computed."""
    if node.op == "call_module":
        return any(
            isinstance(part, nn.modules.dropout._DropoutNd | nn.RReLU) and part.training
            for part in root.get_submodule(str(node.target)).modules()
        )
    return draws_by_itself(node)


def draws_by_itself(node: fx.Node) -> bool:
    """Whether a node of a function or a method draws random numbers."""
    if node.op not in ("call_function", "call_method"):
        return False  # a field or a value of that name
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.rstrip("_") in DRAWING_FUNCTIONS and node.kwargs.get("training", True) is not False
