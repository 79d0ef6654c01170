"""Offload: what autograd keeps of an op is in host memory between its forward and its backward pass.

Storages are moved, each once, however many tensors of an op lie in them, and come back under the same
offsets and strides. Parameters, what the slice has taken in, and what is tiny stay where they are. Autograd
leaves it to hooks to see that what was saved has not been changed since; so it is checked here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from spindle_cli.analysis.autograd import SavedTensorsHooks
from spindle_cli.operators.tensor_group import Shared
from spindle_cli.runtime.step.host_copies import HostMemory, blocks_for

if TYPE_CHECKING:
    from torch import Tensor

# What is smaller costs more to copy than it saves.
LEAST_BYTES = 256
# Ops whose activations may be on their way out while another one runs.
UNDER_WAY = 1


@dataclass(frozen=True)
class _Stays:
    """A saved tensor that stays on the device, and which version of its values."""

    tensor: Tensor
    version: int

    def get(self) -> Tensor:
        _require_same(self.tensor, self.version)
        return self.tensor


@dataclass(frozen=True)
class _Moves:
    """A saved tensor by where it lies in the storages of its op."""

    op: OpCopies
    storage: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def get(self) -> Tensor:
        storage = self.op.reach(self.storage).untyped_storage()
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


class OpCopies:
    """What autograd has saved of one op."""

    def __init__(self, op: int, of_slice: SliceCopies, host: HostMemory, stay: Set[int]) -> None:
        """`stay`: storages that are not moved, as `storage_of` names them."""
        self.op = op
        self._slice = of_slice
        self._host = host
        self._stay = stay
        self._numbers: dict[int, int] = {}
        self._sizes: list[int] = []
        self._here: list[Tensor] | None = []  # the storages' bytes on the device, while these are there
        self._saved: list[tuple[Tensor, int]] = []  # with their versions, until they are given up
        self._blocks: list[Tensor] = []
        self._out: torch.cuda.Event | None = None
        self._back: torch.cuda.Event | None = None

    def pack(self, tensor: Tensor) -> _Stays | _Moves:
        """What autograd is to keep instead of a tensor."""
        kept = tensor.detach()  # shares its version; the tensor itself would keep its own graph alive
        if not self._may_move(tensor):
            return _Stays(kept, _version_of(kept))
        assert self._here is not None, "an op saves while it runs forward"
        key = storage_of(tensor)
        if key not in self._numbers:
            self._numbers[key] = len(self._here)
            storage = tensor.untyped_storage()
            self._sizes.append(storage.nbytes())
            self._here.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        self._saved.append((kept, _version_of(kept)))
        number, offset = self._numbers[key], int(tensor.storage_offset())
        return _Moves(self, number, tensor.dtype, offset, tensor.shape, tensor.stride())

    def _may_move(self, tensor: Tensor) -> bool:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return False
        if tensor.device != self._host.device or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        return storage_of(tensor) not in self._stay and tensor.untyped_storage().nbytes() >= LEAST_BYTES

    def start_out(self) -> None:
        """The op has run forward: copy it all."""
        assert self._here is not None
        self._blocks = [self._host.take() for _ in range(blocks_for(sum(self._sizes)))]
        self._out = self._host.copy_out(self._blocks, self._here)

    @property
    def is_out(self) -> bool:
        """Whether all copies have been made, with nothing to wait for."""
        return self._out is None

    def give_up(self) -> None:
        """Have nothing on the device any more, when all is copied."""
        self._host.await_copy(self._out)
        self._out = None
        for tensor, version in self._saved:
            _require_same(tensor, version)
        self._saved.clear()
        self._here = None

    def start_back(self) -> None:
        """Have it on the device again, or on its way there."""
        if self._here is not None:
            return
        self._here = [torch.empty(size, dtype=torch.uint8, device=self._host.device) for size in self._sizes]
        self._back = self._host.copy_back(self._here, self._blocks)

    def reach(self, storage: int) -> Tensor:
        """The bytes of a storage, which the op's backward pass needs now."""
        self._slice.reach(self)
        self.start_back()
        self._host.await_copy(self._back)
        self._back = None
        assert self._here is not None
        return self._here[storage]

    def leave(self) -> None:
        """The op is through with its backward pass; should it need anything again, it comes once more."""
        self._host.await_copy(self._back)
        self._back = None
        self.give_up()

    def end(self) -> None:
        """Give the blocks back once the slice is through."""
        self.leave()
        self._host.give_back(self._blocks)
        self._blocks = []


class SliceCopies:
    """Moves what one pass of a slice keeps of its ops."""

    def __init__(self, host: HostMemory, stay: Iterable[Tensor]) -> None:
        """`stay`: tensors that are there all the time, such as the slice's inputs."""
        self._host = host
        self._stay = {storage_of(tensor) for tensor in stay}
        self._ops: list[OpCopies] = []
        self._under_way: deque[OpCopies] = deque()
        self._at: OpCopies | None = None  # that runs backward

    @contextmanager
    def moving(self, op: int, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Move what autograd saves inside, of an op that these modules are."""
        parameters = {storage_of(tensor) for module in modules for tensor in _held_by(module)}
        copies = OpCopies(op, self, self._host, self._stay | parameters)
        with SavedTensorsHooks(copies.pack, lambda saved: saved.get()):
            yield
        copies.start_out()
        self._ops.append(copies)
        self._under_way.append(copies)
        if copies.is_out:
            self._make_room(0)

    def make_room(self) -> None:
        """An op begins: of what is under way no more than may be."""
        self._make_room(UNDER_WAY)

    def end_forward(self) -> None:
        """The forward pass is through, and so is all that it has moved."""
        self._make_room(0)

    def watch(self, made: Iterable[Tensor | Shared]) -> None:
        """The op before one that is moved, but not moved itself, has made these: when the gradient of any of
        them is complete, that one's backward pass is through. Autograd runs what was made later first.
        """
        for value in made:
            tensor = value.tensor if isinstance(value, Shared) else value
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._through())  # type: ignore[no-untyped-call]  # torch: untyped

    def begin_backward(self) -> None:
        """The backward pass begins: have there what it needs first."""
        if self._ops:
            self._ops[-1].start_back()

    def reach(self, copies: OpCopies) -> None:
        """An op's backward pass begins: what its neighbour needs, which runs next, may come."""
        if copies is self._at:
            return
        self._through()
        self._at = copies
        copies.start_back()
        before = self._before(copies)
        if before is not None and before.op + 1 == copies.op:
            before.start_back()

    def end_backward(self) -> None:
        """The backward pass is through."""
        self._at = None
        for copies in self._ops:
            copies.end()
        self._ops.clear()

    def _through(self) -> None:
        """The op that ran backward is through: what the one before it needs may come."""
        if self._at is None:
            return
        self._at.leave()
        before, self._at = self._before(self._at), None
        if before is not None:
            before.start_back()

    def _before(self, copies: OpCopies) -> OpCopies | None:
        place = self._ops.index(copies)
        return self._ops[place - 1] if place else None

    def _make_room(self, at_most: int) -> None:
        while len(self._under_way) > at_most:
            self._under_way.popleft().give_up()


def storage_of(tensor: Tensor) -> int:
    """What is the same of tensors in one storage, as long as that is there."""
    return int(tensor.untyped_storage()._cdata)


def _held_by(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _require_same(tensor: Tensor, version: int) -> None:
    if _version_of(tensor) != version:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)} that the backward pass needs has been changed in place "
            f"(version {tensor._version}, saved at {version}); plain PyTorch cannot train this either"
        )
