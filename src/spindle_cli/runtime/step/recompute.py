"""Recomputation: an op keeps its inputs alone, or besides what takes longest, and runs forward once more
when its backward pass needs the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from spindle_cli.operators.batch_dependent import OverShares, PairsOverShares
from spindle_cli.operators.heads.chunked import values_only
from spindle_cli.operators.whole import EnteredAnew, selective_checkpoint
from spindle_cli.runtime.step.held_state import HeldState
from spindle_cli.workload.building.memory import copy_once_written, share_memory

if TYPE_CHECKING:
    pass


def run_recomputed(
    module: nn.Module,
    arguments: Sequence[Any],
    *,
    selective: bool = False,
    may_move: bool = False,
    moves_trained: bool = False,
) -> Any:
    """`module(*arguments)`, keeping for the backward pass the arguments instead of what it computes.

    The second forward pass draws the random numbers of the first, and sees the buffers and attributes that
    the first saw; what it does to them is undone, so that running statistics count every batch once. Hooks
    that it sets on its arguments are not set on those of the first: each has views of its own. Batch
    norms whose statistics are summed over shares take those of the first, and a contrastive loss what it has
    gathered: nothing is summed or gathered again.

    Args:
        selective: keep also what `operators/whole.py` says, which is then not computed again.
        may_move: forward may change parameters that are not trained, as one that moves a teacher does, and
            keep what it likes in objects, classes and files. Operators that are split are known not to.
        moves_trained: so it may those that are, as one that normalises its prototypes does.
    """
    state = ChangedState(module, may_move=may_move, moves_trained=moves_trained)
    runs = module.remembering() if isinstance(module, OverShares | PairsOverShares) else module

    def function(*given: Any) -> Any:
        return runs(*[_own_view(argument) for argument in given])

    # What torch.jit has compiled cannot be left midway, as soon as the backward pass has all that it needs.
    is_compiled = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    with set_checkpoint_early_stop(not is_compiled):
        if selective:
            return selective_checkpoint(function, arguments, state.contexts)
        return checkpoint(
            function, *arguments, use_reentrant=False, context_fn=state.contexts, preserve_rng_state=True
        )


def _own_view(value: Any) -> Any:
    is_tensor = isinstance(value, torch.Tensor) and value.requires_grad
    return value.view_as(value) if is_tensor else value


class ChangedState:
    """What a forward pass changes in a module's buffers and attributes, and, if it may, in parameters that
    are not trained, or in those that are; `before`: as it was.
    """

    def __init__(self, module: nn.Module, *, may_move: bool = False, moves_trained: bool = False) -> None:
        self._module = module
        self._keeps_elsewhere = may_move or moves_trained
        self._moved = [
            held
            for held in module.parameters()
            if (moves_trained if held.requires_grad else may_move or moves_trained)
        ]
        self.before: HeldState | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What the first forward pass runs in, and what the second one does."""
        return self._first(), EnteredAnew(self._again)

    @contextmanager
    def _first(self) -> Iterator[None]:
        # An op that asks for gradients itself runs again before this ends.
        self.before = before = HeldState(
            self._module, copy_once_written, self._moved, keeps_elsewhere=self._keeps_elsewhere
        )
        with values_only(self._module):
            yield
        before.forget_unchanged(share_memory)  # until the backward pass

    @contextmanager
    def _again(self) -> Iterator[None]:
        assert self.before is not None, "there was a first forward pass"
        after = self.before.now()
        self.before.restore()
        try:
            yield
        finally:
            after.restore()
