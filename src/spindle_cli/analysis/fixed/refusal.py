"""Code that reads values: which of the batch's fields they come from, and what is said of it."""

from __future__ import annotations

from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.refuse import Frame

# Key of a node's meta: the frames that it was made in.
FRAMES = "frames"
# What torch says where a tensor without values becomes an array of numpy (by itself, or in a call of scipy).
_NO_ARRAY = ".numpy() is not supported for tensor subclasses"
# What it says of code that torch.jit has compiled, which runs on tensors with values.
_SCRIPTED = "failed in the TorchScript interpreter"
_FIXED_SHAPES = (
    "Compute with tensors of fixed shapes (torch.where instead of `if`, a mask instead of a selection), or "
    "move it into the dataset."
)
_OPERATION = (
    "What has one shape for all values can be an operation of your own (torch.library.custom_op, with "
    "register_fake for its shape)."
)


class ReadsValuesError(WorkloadError):
    """Values are read before there are any.

    `fields`: of the batch, those that they come from; `frames`: where, the innermost last.
    """

    fields: frozenset[str] = frozenset()
    frames: tuple[Frame, ...] = ()

    @classmethod
    def at(
        cls, error: WorkloadError, fields: frozenset[str] = frozenset(), frames: tuple[Frame, ...] = ()
    ) -> ReadsValuesError:
        """Make of an error one that knows the fields and the frames."""
        made = cls(*error.args, hint=error.hint)
        made.fields, made.frames = fields, frames
        return made


def fields_behind(node: fx.Node) -> frozenset[str]:
    """Names of the fields that a node's arguments come from."""
    seen, left = {node}, [node]
    while left:
        for source in left.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                left.append(source)
    return frozenset(str(ancestor.target) for ancestor in seen if ancestor.op == "placeholder")


def reads_values(error: Exception) -> bool:
    """Whether an error says that code cannot do without the values of tensors."""
    reads = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
    return isinstance(error, reads) or leaves_torch(error) or _SCRIPTED in str(error)


def leaves_torch(error: Exception) -> bool:
    """Whether an error says that values go into other code than torch's."""
    return _NO_ARRAY in str(error)


def reading(what: str, error: Exception, *, is_operator: bool) -> tuple[str, str]:
    """What is said of code that reads values, and what to do.

    Args:
        what: the code.
        error: what torch says.
        is_operator: whether it is an operator's, which nothing more can be listed for.
    """
    if leaves_torch(error):
        said = f"{what} takes the values of a tensor out of torch (.numpy()), which has none before it runs"
        return said, f"{_OPERATION} Or move it into the dataset."
    said = f"{what} reads the values of a tensor ({error}), so its shapes cannot be known beforehand"
    return said, f"{_FIXED_SHAPES} {_OPERATION}" if is_operator else _FIXED_SHAPES


def after_selection(use: str) -> tuple[str, str]:
    """What to say of code that is given rows that a mask selects, and what to do; `use`: that code."""
    said = (
        f"{use!r} is given what a mask selects (x[mask]), and how many rows these are "
        "cannot be known beforehand"
    )
    hint = (
        "Of what a mask selects, sums, means, torch's losses and what works on each entry or row are "
        "known. Do the rest for all rows, with torch.where or a mask at the end, or move it into the "
        "dataset."
    )
    return said, hint
