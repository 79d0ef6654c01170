"""What is trained is left as it is by code of the user's that runs between steps: other devices have it, or a
part of it, too. What callbacks do is refused where they do it; what a script has done is noticed by numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree

from spindle_cli.errors import SpindleError, WorkloadError
from spindle_cli.runtime.communication.gradients import GradientPool
from spindle_cli.runtime.part.localise import LocalModel
from spindle_cli.workload.building.load import built_modules
from spindle_cli.workload.building.memory import Array, RefusingWrites, SeeingArrays, handed_out, named_of
from spindle_cli.workload.graph import DECLARE
from spindle_cli.workload.refuse import place_of_caller, place_of_error

_ROW = 1024  # elements that make one number
_FOR_PARAMETERS = (
    f"{DECLARE} Initial values come by `init_from`, and gradients are clipped by `clip_norm` and "
    "`clip_value`. A copy of your own (copy.deepcopy) may be changed."
)
_FOR_BUFFERS = (
    "A number that changes from step to step is an attribute instead (self.beta = 0.0), and declared: "
    "Task(..., step_values={'beta': function}), function(step) giving it for a step counted from 0. Buffers "
    "that follow from what forward computes are changed in forward. Initial values come by `init_from`. A "
    "copy of your own (copy.deepcopy) may be changed."
)

Held = Sequence[tuple[str, str, nn.Module]]  # modules, with their tasks and names


@contextmanager
def refusing_changes(held: Held, said: str) -> Iterator[None]:
    """Refuse whatever changes parameters, buffers or gradients inside, or puts others in their place. Arrays
    of numpy's over their memory are read-only.

    Args:
        held: the modules, with their tasks and names.
        said: what is refused, with {} for what is changed.

    Raises:
        WorkloadError: something does.
    """
    before = _places(held)
    writes = RefusingWrites(
        lambda: _tensors(held),
        lambda what: _changed(said, what, place_of_caller()),
        handed_out().former_owner,
    )
    arrays = _ReadOnlyArrays(held)
    try:
        with writes, arrays:
            yield
    except ValueError as error:
        if (names := handed_out().refused_by_array(error, arrays.given)) is None:
            raise
        raise _changed(said, names, place_of_error(error)) from error
    finally:
        if writes.refused is not None:
            raise writes.refused
    for key, place in _places(held).items():
        if before.get(key) != place:
            raise _changed(said, f"the parameter {key[1]}", None)


def written_in(error: Exception, step: int) -> WorkloadError | None:
    """The refusal of what an error says has written into a read-only array of a build's while a step (counted
    from 1) ran; None if it says something else.
    """
    names = handed_out().refused_by_array(error)
    said = f"what runs in step {step} (a hook, say) changes {{}}"
    return None if names is None else _changed(said, names, place_of_error(error))


def _places(held: Held) -> dict[tuple[int, str], tuple[int, int]]:
    """Which tensor is each parameter, and where its memory is."""
    return {
        (id(module), named_of(task, name)): (id(tensor), tensor.data_ptr())
        for task, prefix, module in held
        for name, tensor in module.named_parameters(prefix=prefix)
    }


def _changed(said: str, what: str, place: str | None) -> WorkloadError:
    where = f"{place}: " if place else ""
    return WorkloadError(
        f"{where}{said.format(what)}: other devices have it, or a part of it, and the next step has begun",
        hint=_FOR_BUFFERS if what.startswith("the buffer") else _FOR_PARAMETERS,
    )


def _tensors(held: Held) -> Iterator[tuple[str, Tensor]]:
    for task, prefix, module in held:
        for name, parameter in module.named_parameters(prefix=prefix):
            yield f"the parameter {named_of(task, name)}", parameter
            if parameter.grad is not None:
                yield f"the gradient of {named_of(task, name)}", parameter.grad
        for name, buffer in module.named_buffers(prefix=prefix):
            yield f"the buffer {named_of(task, name)}", buffer


class _ReadOnlyArrays(SeeingArrays):
    """Inside, arrays of numpy's over the memory of some modules' tensors are read-only: no operation of
    torch's tells what is written through them. Memory that is handed out otherwise (DLPack) is refused.

    Attributes:
        given: the names of the tensors over which there are such arrays.
    """

    def __init__(self, held: Held) -> None:
        super().__init__(self._take)
        self._held = held
        self.given: dict[str, None] = {}

    def _take(self, array: Array, tensor: Tensor) -> None:
        if (name := self._name_of(tensor)) is not None:
            array.flags.writeable = False
            self.given[name] = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__dlpack__ and (name := self._name_of(args[0])) is not None:
            raise RuntimeError(
                f"{name} hands out its memory, and nobody would see what is written there: take .numpy(), "
                "which is read-only here, or a clone"
            )
        return super().__torch_function__(func, types, args, kwargs)

    def _name_of(self, tensor: Tensor) -> str | None:
        memory = _memory(tensor)
        names = (name for name, candidate in _tensors(self._held) if _memory(candidate) == memory)
        return None if memory is None else next(names, None)


# They ask for no values; neither does whatever is an attribute.
_WITHOUT_VALUES = {"__get__", "size", "numel", "dim", "ndimension", "nelement", "element_size", "stride"}
_WITHOUT_VALUES |= {"is_floating_point", "is_complex", "__hash__", "__len__", "register_hook"}


class RefusingWhatIsAbsent(TorchFunctionMode):
    """Inside, an operation on a tensor that has no memory raises RuntimeError; otherwise it would read memory
    that is not there.

    A script may call while a mode of its own is open, behind which none can be left: so it is switched, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_on = True

    def switch_on(self) -> None:
        """Refuse from here on, until `switch_off` is called."""
        self._is_on = True
        if self not in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]  # torch: untyped
            self.__enter__()  # type: ignore[no-untyped-call]  # torch: untyped

    def switch_off(self) -> None:
        """Stop refusing."""
        self._is_on = False
        if _get_current_function_mode_stack()[-1:] == [self]:  # type: ignore[no-untyped-call]  # torch: untyped
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch: untyped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_on and func.__name__ not in _WITHOUT_VALUES:
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


@dataclass(frozen=True)
class _Seen:
    """A tensor and the numbers that it makes, before the script's code runs."""

    name: str
    tensor: Tensor
    numbers: Tensor


class LeftAlone:
    """What is trained, which a script leaves alone between calls of its trainer.

    It is compared by numbers, as a script has other ways to write than operations of torch's: an array of
    numpy's over the same memory. What ranks exchange behind a step may still be on its way; so each compares
    what it steps itself.
    """

    def __init__(self, model: LocalModel, pool: GradientPool, source: str) -> None:
        """`source`: of the workload, of which the script may hold other builds."""
        self._model = model
        self._pool = pool
        self._source = source
        self._seen: list[_Seen] | None = None
        self._places: dict[tuple[int, str], tuple[int, int]] = {}
        self._differ: dict[str, Tensor] = {}  # on a GPU, where nobody has waited for it
        self._refusing = RefusingWhatIsAbsent()
        self._has_ended = False

    def begin(self) -> None:
        """Note how everything is when the script's code begins to run."""
        if self._has_ended:
            return
        self._seen = [_Seen(name, tensor, _numbers(tensor)) for name, tensor in self._tensors()]
        self._places = _places(built_modules(self._source))
        if any(map(_is_absent, self._model.parameters.values())):
            self._refusing.switch_on()

    @contextmanager
    def called(self, done: int, *, waits: bool = True) -> Iterator[None]:
        """Inside runs what the script has called behind so many steps; its own code before and behind it.

        What that has done to gradients is forgotten, as by zero_grad().

        Args:
            waits: for a GPU, to know of what is there, too.

        Raises:
            WorkloadError: the script has changed something.
        """
        if self._seen is None:  # a callback of its own calls
            yield
            return
        self._refusing.switch_off()
        when = f"after step {done}" if done else "before the first step"
        self._compare(f"the script changes {{}} between steps ({when})", waits=waits)
        self._pool.reset()
        try:
            yield
        except SpindleError:  # which the script may catch, and go on
            self.begin()
            raise
        self.begin()

    def end(self) -> None:
        """The script may do from here on what it likes."""
        self._has_ended = True
        self._seen = None
        self._refusing.switch_off()

    def _compare(self, said: str, *, waits: bool) -> None:
        for key, place in _places(built_modules(self._source)).items():
            if self._places.get(key, place) != place:
                raise _changed(said, f"the parameter {key[1]}", place_of_caller())
        for seen in self._seen or ():
            differs = (_numbers(seen.tensor) != seen.numbers).any()
            self._differ[seen.name] = differs | self._differ.get(seen.name, differs)
        self._seen = None
        for name, differs in self._differ.items():
            if (waits or differs.is_cpu) and bool(differs):
                raise _changed(said, name, place_of_caller())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        model = self._model
        watched = [
            *((f"the parameter {owned.name!r}", owned.tensor) for owned in self._pool.owned_ranges),
            *(
                (f"the parameter {name!r}", parameter)
                for name, parameter in model.parameters.items()
                if not parameter.requires_grad
            ),
            *((f"the buffer {name!r}", buffer) for name, buffer in model.all_buffers.items()),
        ]
        trained = {_memory(tensor) for tensor in (*model.parameters.values(), *(held for _, held in watched))}
        others = (
            (name, tensor)
            for name, tensor in _tensors(built_modules(self._source))
            if _memory(tensor) not in trained and not name.startswith("the gradient")
        )
        yield from ((name, tensor) for name, tensor in (*watched, *others) if _memory(tensor) is not None)


def _memory(tensor: Tensor) -> int | None:
    """What tells whose memory a tensor has; None: it has none."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == 0:
        return None
    return int(tensor.untyped_storage()._cdata)


@torch.no_grad()
def _numbers(tensor: Tensor) -> Tensor:
    """A number for each row of a tensor's elements, in their order: a sum that weighs each otherwise. As
    whole numbers, which are equal where they are not numbers.
    """
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = values.detach().reshape(-1)
    if flat.dtype != torch.float64:
        flat = flat.to(torch.float32 if flat.is_floating_point() else torch.float64)
    weights = torch.linspace(1, 2, _ROW, dtype=flat.dtype, device=flat.device)
    whole = len(flat) // _ROW * _ROW
    with torch.autocast(flat.device.type, enabled=False):
        rows = torch.mv(flat[:whole].view(-1, _ROW), weights)
        rest = torch.dot(flat[whole:], weights[: len(flat) - whole])
    return torch.cat([rows, rest[None]]).view(torch.int32)
