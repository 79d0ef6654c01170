"""Call the callbacks of a run, and say of what one raises whose it is.

Code of the user's that reads a parameter that is shared out is told that it is not there, and what changes
one is refused: other devices have it, or a part of it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from spindle_cli.errors import RunFailedError, SpindleError, WorkloadError
from spindle_cli.runtime.following.callback import Callback, RunInfo
from spindle_cli.runtime.results import Step
from spindle_cli.workload.building.load import built_modules
from spindle_cli.workload.building.writes import RefusingWrites
from spindle_cli.workload.refuse import place_of_caller, place_of_error
from spindle_cli.workload.tracing.moves import DECLARE

if TYPE_CHECKING:
    from spindle_cli.files.runs.evaluations import Evaluation


class Callbacks:
    """Those of this rank, in their order; raises RunFailedError where one of them raises anything."""

    def __init__(self, callbacks: Sequence[Callback], rank: int, source: str | None = None) -> None:
        """`source`: of the workload, whose builds they leave as they are."""
        self._source = source
        self._own = tuple(each for each in callbacks if each.on_every_rank or rank == 0)

    def at_start(self, run: RunInfo) -> None:
        """See `Callback`."""
        self._call("at_start", "before the first step", lambda callback: callback.at_start(run))

    def after_step(self, step: Step) -> None:
        """See `Callback`."""
        self._call("after_step", f"step {step.number}", lambda callback: callback.after_step(step))

    def at_checkpoint(self, step: int, folder: Path) -> None:
        """See `Callback`."""
        self._call("at_checkpoint", f"step {step}", lambda callback: callback.at_checkpoint(step, folder))

    def at_evaluation(self, evaluation: Evaluation) -> None:
        """See `Callback`."""
        when = f"task {evaluation.task!r} after step {evaluation.step}"
        self._call("at_evaluation", when, lambda callback: callback.at_evaluation(evaluation))

    def at_end(self) -> None:
        """See `Callback`."""
        self._call("at_end", "after the last step", lambda callback: callback.at_end())

    def _call(self, name: str, when: str, call: Callable[[Callback], None]) -> None:
        for callback in self._own:
            held = [] if self._source is None else built_modules(self._source)
            said = f"the callback {type(callback).__name__} changes {{}} in {name} ({when})"
            with _blaming(callback, name, when), refusing_changes(held, said), RefusingWhatIsAbsent():
                call(callback)


@contextmanager
def _blaming(callback: Callback, name: str, when: str) -> Iterator[None]:
    try:
        yield
    except SpindleError:
        raise
    except Exception as error:  # code of the user's
        place = place_of_error(error)
        where = f", at {place}" if place else ""
        raise RunFailedError(
            f"the callback {type(callback).__name__} failed in {name} ({when}): "
            f"{type(error).__name__}: {error}{where}",
            hint="Checkpoints from before are there: go on from one with --resume, once it is mended.",
        ) from error


def require_callbacks(found: Sequence[object]) -> tuple[Callback, ...]:
    """Give what was found, once it is known that all are callbacks.

    Raises:
        WorkloadError: one is something else.
    """
    for each in found:
        if not isinstance(each, Callback):
            made = f"the class {each.__name__}" if isinstance(each, type) else f"a {type(each).__name__}"
            raise WorkloadError(
                f"callbacks: found {made}, expected an object of a class derived from spindle_cli.Callback",
                hint="Derive the class from spindle_cli.Callback, and give an object of it.",
            )
    return tuple(each for each in found if isinstance(each, Callback))


@contextmanager
def refusing_changes(held: Sequence[tuple[str, str, nn.Module]], said: str) -> Iterator[None]:
    """Refuse whatever changes parameters, buffers or gradients inside, or puts others in their place.

    Args:
        held: the modules, with their tasks and names.
        said: what is refused, with {} for what is changed.

    Raises:
        WorkloadError: something does.
    """
    before = _places(held)
    writes = RefusingWrites(lambda: _tensors(held), lambda what: _changed(said, what, place_of_caller()))
    try:
        with writes:
            yield
    finally:
        if writes.refused is not None:
            raise writes.refused
    for key, place in _places(held).items():
        if before.get(key) != place:
            raise _changed(said, f"the parameter {key[1]}", None)


def _places(held: Sequence[tuple[str, str, nn.Module]]) -> dict[tuple[int, str], tuple[int, int]]:
    """Which tensor is each parameter, and where its memory is."""
    return {
        (id(module), _named(task, name)): (id(tensor), tensor.data_ptr())
        for task, prefix, module in held
        for name, tensor in module.named_parameters(prefix=prefix)
    }


def _named(task: str, name: str) -> str:
    return f"{name!r} of task {task!r}"


def _changed(said: str, what: str, place: str | None) -> WorkloadError:
    where = f"{place}: " if place else ""
    return WorkloadError(
        f"{where}{said.format(what)}: other devices have it, or a part of it, and the next step has begun",
        hint=f"{DECLARE} Initial values come by `init_from`, and gradients are clipped by `clip_norm` and "
        "`clip_value`. A copy of your own (copy.deepcopy) may be changed.",
    )


def _tensors(held: Sequence[tuple[str, str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    for task, prefix, module in held:
        for name, parameter in module.named_parameters(prefix=prefix):
            yield f"the parameter {_named(task, name)}", parameter
            if parameter.grad is not None:
                yield f"the gradient of {_named(task, name)}", parameter.grad
        for name, buffer in module.named_buffers(prefix=prefix):
            yield f"the buffer {_named(task, name)}", buffer


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
