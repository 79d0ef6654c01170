"""What an op is checked on: parameters of its own, and samples whose counts differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spindle_cli.training.data.reading import first_batch
from spindle_cli.training.items import seed_of
from spindle_cli.training.precision import constants_of_modules, convert_constants, dtype_in
from spindle_cli.workload.building.attributes import Before, hold_parameter, tensors_kept
from spindle_cli.workload.building.memory import swap
from spindle_cli.workload.graph import IGNORED_LABEL, Op, TaskGraph, ValueSpec

# Enough that orders and neighbours among the samples show.
MOST_SAMPLES = 6
# Among so many of the first batch's samples those are chosen that count least and most.
_LOOKED_AT = 64


def choose_samples(task: TaskGraph, seed: int) -> dict[str, Tensor]:
    """Samples of the task's first batch, the first of which has the fewest entries that count (labels that
    are not ignored, masks and tokens that are not zero) and another the most.

    Raises:
        WorkloadError: the dataset has no batch.
    """
    batch = first_batch(task, seed, min(task.task.batch_size, _LOOKED_AT))
    count = len(next(iter(batch.values())))
    order = torch.argsort(_counts(batch, count), stable=True)
    chosen = order[torch.linspace(0, count - 1, min(MOST_SAMPLES, count)).round().long()]
    return {name: field.index_select(0, chosen) for name, field in batch.items()}


def _counts(batch: Mapping[str, Tensor], count: int) -> Tensor:
    """Return how many entries of whole numbers and booleans count in each sample, all fields together."""
    total = torch.zeros(count, dtype=torch.long)
    for field in batch.values():
        if not field.is_floating_point() and not field.is_complex():
            total += ((field != IGNORED_LABEL) & (field != 0)).reshape(count, -1).sum(1)
    return total


def stand_in(spec: ValueSpec, samples: int, dtype: torch.dtype) -> Tensor:
    """Some value of an op's input, for so many samples."""
    shape = spec.shape_of(samples)
    if not spec.dtype.is_floating_point and not spec.dtype.is_complex:
        return torch.zeros(shape, dtype=spec.dtype)
    generator = torch.Generator().manual_seed(seed_of(spec.name))
    return torch.randn(shape, dtype=dtype_in(spec.dtype, dtype), generator=generator)


@contextmanager
def made_real(root: nn.Module) -> Iterator[None]:
    """Give a module's parameters and buffers that are on the meta device values inside: to whoever has them,
    as they stay the same objects.
    """
    held = [
        tensor for tensor in (*root.parameters(), *root.buffers()) if tensor.is_meta and not is_lazy(tensor)
    ]
    made = [
        nn.Parameter(_drawn(tensor), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else _drawn(tensor)
        for tensor in held
    ]
    for pair in zip(held, made, strict=True):
        swap(*pair)
    try:
        yield
    finally:
        for pair in zip(held, made, strict=True):
            swap(*pair)


def _drawn(like: Tensor) -> Tensor:
    if not like.is_floating_point() and not like.is_complex():
        return torch.zeros(like.shape, dtype=like.dtype)
    return torch.randn(like.shape, dtype=like.dtype, generator=torch.Generator().manual_seed(0))


class Values:
    """Tensors in the place of what a task's ops hold, while they are checked.

    Parameters are drawn by their names, at a scale that keeps activations and gradients of order one; nothing
    is zero, as new layers often are, since that would hide what comes through them. Buffers are copies, but
    for those that were made of parameters, which have no values before these have: they are drawn like them.
    What else ops write into has its values again, too.
    """

    def __init__(
        self,
        root: nn.Module,
        parameters: Iterable[str],
        buffers: Iterable[str],
        dtype: torch.dtype,
        *,
        keeps: bool,
    ) -> None:
        """`parameters`, `buffers`: by their dotted names in `root`; `keeps`: ops keep something else."""
        self._root = root
        self._dtype = dtype
        self._parameters = tuple(parameters)
        self._buffers = tuple(buffers)
        self._attributes: list[Before] = []
        self._keeps = keeps
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._before = {name: self._buffer(name, buffer) for name, buffer in self.buffers().items()}

    @classmethod
    def of_op(cls, task: TaskGraph, op: Op, dtype: torch.dtype) -> Values:
        """Keep the values of all that one op holds."""
        return cls(task.root, op.parameters, op.buffers, dtype, keeps=bool(op.kept))

    @classmethod
    def of_task(cls, task: TaskGraph, dtype: torch.dtype) -> Values:
        """Keep the values of all that a task holds, used or not."""
        parameters = [name for name, _ in task.root.named_parameters()]
        buffers = [name for name, _ in task.root.named_buffers()]
        return cls(task.root, parameters, buffers, dtype, keeps=any(op.kept for op in task.ops))

    @contextmanager
    def held(self) -> Iterator[dict[str, nn.Parameter]]:
        """Let the modules hold the values inside; gives the parameters by name."""
        made = {name: self._parameter(name) for name in self._parameters}
        places = list(self._places(made))
        buffers, constants = self.buffers(), list(constants_of_modules(self._root))
        try:
            for module, name, _, ours in places:
                hold_parameter(module, name, ours)
            convert_constants(self._root, self._dtype)
            self._attributes = [Before(owner) for owner in self._owners()]
            kept = tensors_kept(self._root) if self._keeps else []
            self._kept = [(tensor, tensor.detach().clone()) for tensor in kept]
            self.start_anew()
            yield made
        finally:
            self._give_kept_anew()
            for attributes, name, constant in constants:
                attributes[name] = constant
            for module, name, theirs, _ in places:
                hold_parameter(module, name, theirs)
            for name, buffer in buffers.items():
                self._hold(name, buffer)

    def _places(
        self, made: Mapping[str, nn.Parameter]
    ) -> Iterator[tuple[nn.Module, str, nn.Parameter, nn.Parameter]]:
        """Yield where parameters are, by every name that they have: module, name, parameter, and the one that
        was made for it.
        """
        by_id = {id(self._root.get_parameter(name)): parameter for name, parameter in made.items()}
        for module in self._root.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in by_id:
                    yield module, name, parameter, by_id[id(parameter)]

    def buffers(self) -> dict[str, Tensor]:
        """Return what the modules hold now."""
        return {name: self._root.get_buffer(name) for name in self._buffers}

    def start_anew(self) -> None:
        """Let the modules hold copies of their buffers as they were before anything has run, and what they
        keep beside these (how long a table is).
        """
        for attributes in self._attributes:
            attributes.restore()
        self._give_kept_anew()
        for name, before in self._before.items():
            dtype = dtype_in(before.dtype, self._dtype)
            self._hold(name, before.to(dtype, copy=True))  # forward may change it in place

    def _give_kept_anew(self) -> None:
        for kept, values in self._kept:
            kept.data.copy_(values)

    def _owners(self) -> list[nn.Module]:
        """Return the modules that hold the buffers."""
        names = dict.fromkeys(name.rpartition(".")[0] for name in self._buffers)
        return [self._root.get_submodule(name) for name in names]

    def give_parameters_anew(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let parameters that `held` gave, which forward may have changed, be as they began."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self._drawn(name, parameter))

    def _hold(self, name: str, buffer: Tensor) -> None:
        owner, _, attribute = name.rpartition(".")
        self._root.get_submodule(owner)._buffers[attribute] = buffer

    def _parameter(self, name: str) -> nn.Parameter:
        like = self._root.get_parameter(name)
        return nn.Parameter(self._drawn(name, like), like.requires_grad)

    def _buffer(self, name: str, buffer: Tensor) -> Tensor:
        if not buffer.is_meta:
            return buffer.detach().clone()
        if not buffer.is_floating_point() and not buffer.is_complex():
            return torch.zeros(buffer.shape, dtype=buffer.dtype)
        return self._drawn(name, buffer)

    def _drawn(self, name: str, like: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed_of(name))
        values = torch.randn(like.shape, dtype=dtype_in(like.dtype, self._dtype), generator=generator)
        if like.dim() < 2:
            values = 0.5 + values / 4  # scales of norms and biases alike
        else:
            values *= like[0].numel() ** -0.5
        return values
