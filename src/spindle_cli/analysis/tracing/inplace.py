"""Refuse changes of a tensor in place that would be lost, or seen by others, once a trace is cut into ops."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from spindle_cli.analysis.fixed.refusal import FRAMES, ReadsValuesError
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.graph import DECLARE
from spindle_cli.workload.refuse import refusal

# Of Python's operators, those that change their first argument; `and_` and its like are only called so as
# `and` is a keyword.
_PYTHONS = frozenset(
    {
        *(operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv),
        *(operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior),
        *(operator.ixor, operator.ilshift, operator.irshift),
    }
)
APART = (
    "Put what moves parameters or buffers into an nn.Module of its own and list its class in the workload's "
    "`operators`: it is then run as it is."
)
HINT = "Use what returns a new tensor (add instead of add_, inplace=False, x = x + y instead of x += y)."


def way_out(root: nn.Module, held: fx.Node) -> str:
    """What to do instead of changing what a module holds."""
    return f"{DECLARE} Or: {APART}" if _is_parameter(root, held) else APART


def refusal_of_state(
    root: nn.Module, held: fx.Node, refused: WorkloadError, change: fx.Node
) -> WorkloadError:
    """The refusal of a change of what a module holds: of a buffer, the statements around it may run as they
    are written instead.
    """
    if _is_parameter(root, held):
        return refused
    return ReadsValuesError.at(refused, frames=change.meta.get(FRAMES, ()))


def _is_parameter(root: nn.Module, held: fx.Node) -> bool:
    """Whether what a module holds is a parameter."""
    owner, _, name = str(held.target).rpartition(".")
    return isinstance(getattr(root.get_submodule(owner), name, None), nn.Parameter)


def check_in_place(task: str, root: nn.Module, graph: fx.Graph) -> None:
    """Refuse glue that changes a tensor in place and is not its only user.

    Raises:
        WorkloadError: with the place in the user's code.
    """
    for node in graph.nodes:
        if _writes_elsewhere(node):
            raise _refusal_of_out(task, node)
        changed = changed_in_place(node, root)
        if changed is None:
            continue
        state = _state(changed, root)
        if state is not None:
            what = f"{node.name!r} changes {str(state.target)!r} in place, which a trace would lose"
            refused = refusal(task, what, node.meta.get("place"), way_out(root, state))
            raise refusal_of_state(root, state, refused, node)
        if not node.users or len(changed.users) > 1:
            raise _refusal(task, node, changed)


def check_homes(task: str, root: nn.Module, graph: fx.Graph, homes: Mapping[fx.Node, int]) -> None:
    """Refuse glue that changes in place what another op hands on.

    Raises:
        WorkloadError: with the place in the user's code.
    """
    for node in graph.nodes:
        changed = changed_in_place(node, root)
        # A copy that has no home is made where it is changed.
        is_copied_there = changed is not None and changed.target == "clone" and changed not in homes
        if changed is not None and not is_copied_there and homes.get(changed) != homes.get(node):
            raise _refusal(task, node, changed)


def changed_in_place(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """The tensor that a node of glue changes, by torch's conventions: add_, inplace=True."""
    if node.op == "call_method":
        in_place = is_in_place_name(str(node.target))
    elif node.op == "call_function":
        in_place = _is_in_place_function(node.target) or node.kwargs.get("inplace") is True
    elif node.op == "call_module":
        in_place = getattr(root.get_submodule(str(node.target)), "inplace", False) is True
    else:
        return None
    changed = node.args[0] if node.args else None
    return changed if in_place and isinstance(changed, fx.Node) else None


def _writes_elsewhere(node: fx.Node) -> bool:
    """Whether a call writes into tensors by other ways than a trace follows: into those of out=, of a list
    (torch._foreach_mul_), or by an operation that is called by its overload (torch.ops.aten.add_.Tensor).
    """
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if node.kwargs.get("out") is not None or (schema is not None and schema.is_mutable):
        return True
    listed = bool(node.args) and isinstance(node.args[0], list | tuple)
    return listed and _is_in_place_function(node.target)


def _refusal_of_out(task: str, node: fx.Node) -> Exception:
    name = getattr(node.target, "__name__", str(node.target))
    return refusal(
        task,
        f"forward calls {name} between operators, which writes into tensors that it is given (by out=, in a "
        "list), and a trace would not keep that",
        node.meta.get("place"),
        "Take what it gives (z = torch.add(x, y)). Or put this into an nn.Module of its own and list its "
        "class in the workload's `operators`: it is then run as it is.",
    )


def _state(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """The parameter or buffer that a node is, or was before it was changed in place."""
    source: Any = changed_in_place(node, root)
    if node.target is getattr and node.args[1] == "data":
        source = node.args[0]
    if isinstance(source, fx.Node):
        return _state(source, root)
    return node if node.op == "get_attr" else None


def _is_in_place_function(function: Any) -> bool:
    if getattr(function, "__module__", None) == operator.add.__module__:
        return function in _PYTHONS
    return is_in_place_name(getattr(function, "__name__", ""))


def is_in_place_name(name: str) -> bool:
    """Whether a method or function of torch changes its tensor, by its name."""
    return name.endswith("_") and not name.endswith("__") and not name.startswith("requires_grad")


def _refusal(task: str, node: fx.Node, changed: fx.Node) -> Exception:
    what = f"{node.name!r} changes {changed.name!r} in place, which other operators or glue use"
    return refusal(task, what, node.meta.get("place"), HINT)
