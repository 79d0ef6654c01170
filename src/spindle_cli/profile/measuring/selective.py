"""What an op saves, and what it computes again, where it is recomputed but for what takes longest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spindle_cli.operators.whole.selective import selective_checkpoint
from spindle_cli.profile.op.op_memory import LEAST_SELECTED_BYTES, with_selective
from spindle_cli.profile.op.op_run import OpRun
from spindle_cli.profile.types import SelectiveMemory, ShareMemory

if TYPE_CHECKING:
    from torch import Tensor

# How often both ways are timed, by turns.
_REPEATS = 5
# Relative, by the type that is computed in: the same kernels run on the same numbers.
_TOLERANCE, _NARROW_TOLERANCE = 1e-3, 2e-2


def measure_selective(run: OpRun, memory: ShareMemory) -> ShareMemory:
    """Run an op both ways; `memory` as it is where that saves too little, where gradients are others, or
    where torch refuses it, as it does where an op changes in place what would be kept.

    Args:
        run: the op, warm.
        memory: what it takes where nothing is recomputed.
    """
    is_trained = any(source.requires_grad for source in (*run.module.parameters(), *run.inputs))
    if memory.kept_bytes < LEAST_SELECTED_BYTES or not is_trained:
        return memory
    selecting = OpRun(Selecting(run.module), run.inputs, run.num_fields, run.clock)
    try:
        if not _same_gradients(run, selecting):
            return memory
        kept_bytes = selecting.memory().kept_bytes
    except RuntimeError:  # torch's, or of `selective_checkpoint`: the op itself has run before
        return memory
    pairs = [(run.repeat(1), selecting.repeat(1)) for _ in range(_REPEATS)]
    # The shortest of each: what other programs take only adds to a time, and much to a difference of two.
    again_s = min(chosen.total_s for _, chosen in pairs) - min(plain.total_s for plain, _ in pairs)
    forward_s = min(plain.forward_s for plain, _ in pairs)
    share = min(max(again_s, 0.0) / forward_s, 1.0) if forward_s > 0 else 1.0
    return with_selective(memory, SelectiveMemory(kept_bytes=kept_bytes, share=share))


class Selecting(nn.Module):
    """An op that is recomputed but for what takes longest."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        """What the op gives."""
        return selective_checkpoint(self.module, arguments)


def _same_gradients(run: OpRun, other: OpRun) -> bool:
    """Whether both give the same gradients, for the same random numbers."""
    for own, theirs in zip(_gradients(run), _gradients(other), strict=True):
        is_narrow = own.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(own.device.type)
        tolerance = _NARROW_TOLERANCE if is_narrow else _TOLERANCE
        if not bool((own - theirs).norm() <= tolerance * own.norm()):
            return False
    return True


def _gradients(run: OpRun) -> Sequence[Tensor]:
    """The gradients of a run's parameters and inputs, and what it gives."""
    devices = [tensor.device for tensor in run.inputs if tensor.is_cuda][:1]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        outputs = run.module(*run.inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        ends = [output for output in outputs if output.requires_grad]
        sources = [*run.module.parameters(), *run.inputs]
        wanted = [source for source in sources if source.requires_grad]
        gradients = torch.autograd.grad(
            ends, wanted, [torch.randn_like(end) for end in ends], allow_unused=True
        )
    return [tensor.detach() for tensor in (*outputs, *gradients) if tensor is not None]
