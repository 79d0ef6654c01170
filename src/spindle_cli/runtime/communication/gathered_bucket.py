"""Buckets of a matrix whose gradient is made on every rank of what all gather: rows of an embedding with
their ids, or the two factors of a linear map.

Each rank's part of one flat buffer has room for the largest share that the plan has, and says whether its
backward passes have reached the matrix. What is not filled is zeros, which add nothing. All ranks make the
same gradient of the same buffer in the same order, so that copies stay equal bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from spindle_cli.costs.parameters import ID_BYTES, Summing
from spindle_cli.errors import InputError
from spindle_cli.runtime.communication.collectives import Members, start_gather
from spindle_cli.runtime.communication.reached import Agreement, read_flags
from spindle_cli.runtime.communication.transfers import wait_for
from spindle_cli.runtime.update.owned_ranges import OwnedRange, round_up
from spindle_cli.training.precision import gradient_dtype

if TYPE_CHECKING:
    from torch import Tensor

# Parts begin where tensors of any dtype may.
_ALIGNMENT_BYTES = 16
# Whether it has reached the matrix, and whether what was found out before holds for it (`Agreement`).
_FLAG_BYTES = 2


class GatheredBucket:
    """One matrix that every rank steps whole, and whose gradient none of them sums.

    Attributes:
        name: of the matrix.
        parameter: the matrix; its `.grad` is there from the end of the gather until the next iteration.
        owned_ranges: what this rank steps: all of it.
    """

    buffer_bytes = 0  # a gather takes no memory beside what is there all the time

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        members: Members,
        way: Summing,
        share_tokens: int,
        factors: torch.dtype | None = None,
        *,
        is_steady: bool = False,
    ) -> None:
        """`way`: rows or factors. `share_tokens`: of the largest share in a step. `factors`: their dtype;
        None: that of the matrix. `is_steady`: the same passes reach it in every step.
        """
        assert way is not Summing.DENSE, "dense sums have buckets of their own"
        self.name, self.parameter = name, parameter
        self.owned_ranges = (OwnedRange(name, None, parameter, counted=members.position == 0),)
        self._members, self._way = members, way
        self._parts = _Parts.of(parameter, members.count, way, share_tokens, factors or parameter.dtype)
        self._gradient = torch.zeros_like(parameter, dtype=gradient_dtype(parameter), requires_grad=False)
        self._filled = 0
        self._is_reached = False
        self._agreement = Agreement([name if is_steady else None])
        self.turn_to = self._agreement.turn_to
        self._work: dist.Work | None = None
        self.reset()

    def take_rows(self, ids: Tensor, rows: Tensor) -> None:
        """What a lookup brings to the gradient: `ids` (n), and for each a row (n, width)."""
        room = self._room(Summing.ROWS, ids.numel())
        self._parts.ids[self._members.position, room].copy_(ids)
        self._parts.rows[self._members.position, room].copy_(rows)

    def take_factors(self, outputs: Tensor, inputs: Tensor) -> None:
        """What a product brings to it: the gradient of its output (n, outputs), and its input (n, inputs)."""
        room = self._room(Summing.FACTORS, inputs.shape[0])
        self._parts.outputs[self._members.position, room].copy_(outputs)
        self._parts.rows[self._members.position, room].copy_(inputs)

    def start_sum(self) -> dist.Work:
        """Start the gather; this rank has taken all of its share."""
        holds = self._agreement.tell([self._is_reached])
        flags = self._parts.flags[self._members.position]
        for flag, is_set in zip(flags, (self._is_reached, holds), strict=True):
            flag.fill_(int(is_set))
        self._work = start_gather(self._parts.flat, self._members)
        return self._work

    def is_summed(self) -> bool:
        """Whether `finish_sum` would not wait."""
        assert self._work is not None, "asked after the gather was started"
        return self._work.is_completed()

    def finish_sum(self) -> None:
        """Wait for the gather, and make the gradient; none where no rank's backward pass reached the matrix.

        Raises:
            InputError: a gradient came to the matrix by another way, which the plan knows nothing of.
        """
        assert self._work is not None, "every bucket is summed in every iteration"
        wait_for(self._work)
        self._work = None
        if self.parameter.grad is not None:
            raise self._refusal("it has uses of another kind")
        (is_reached,) = self._agreement.outcome(lambda: read_flags(self._parts.flags.amax(0)))
        if not is_reached:
            return
        self._make_gradient()
        self.parameter.grad = self._gradient

    def leave_out(self) -> None:
        """Nothing of it was run in this iteration: it has no gradient."""
        self.parameter.grad = None

    def reset(self) -> None:
        """Forget the gradient, for the next iteration."""
        self.parameter.grad = None
        self._parts.flat.zero_()
        self._filled = 0
        self._is_reached = False

    def _room(self, way: Summing, tokens: int) -> slice:
        """The next places of this rank's part.

        Raises:
            InputError: the plan has other uses of the matrix, or room for fewer tokens.
        """
        if way is not self._way:
            raise self._refusal(f"it is used by {way}")
        first, self._filled = self._filled, self._filled + tokens
        if self._filled > self._parts.rows.shape[1]:
            raise self._refusal(f"the plan has room for {self._parts.rows.shape[1]} tokens of a share")
        self._is_reached = True
        return slice(first, self._filled)

    def _refusal(self, why: str) -> InputError:
        return InputError(
            f"{self.name}: its gradient is gathered by {self._way}, but {why}",
            hint="Profile the workload again, and plan again from that.",
        )

    def _make_gradient(self) -> None:
        rows = self._parts.rows.flatten(0, 1)
        if self._way is Summing.FACTORS:
            outputs = self._parts.outputs.flatten(0, 1)
            self._gradient.copy_(outputs.t() @ rows)
            return
        ids = self._parts.ids.flatten().long()
        rows = rows.to(self._gradient.dtype)
        self._gradient.zero_()
        if rows.is_cuda:  # in order of the places; `index_add_` there adds in any order
            self._gradient.index_put_((ids,), rows, accumulate=True)
        else:
            self._gradient.index_add_(0, ids, rows)


@dataclass(frozen=True)
class _Parts:
    """The buffer: of each rank rows, then ids or the other factor, then whether it has reached the matrix.

    Attributes:
        flat: all of it, in bytes.
        rows: (ranks, tokens, inputs); rows of an embedding, or inputs of a linear map.
        ids: (ranks, tokens). `outputs`: (ranks, tokens, outputs). One of both is empty.
        flags: (ranks, 2).
    """

    flat: Tensor
    rows: Tensor
    ids: Tensor
    outputs: Tensor
    flags: Tensor

    @classmethod
    def of(cls, parameter: nn.Parameter, count: int, way: Summing, tokens: int, dtype: torch.dtype) -> _Parts:
        outputs, inputs = parameter.shape
        num_ids = tokens if way is Summing.ROWS else 0
        of_outputs = tokens if way is Summing.FACTORS else 0
        sizes = (tokens * inputs * dtype.itemsize, num_ids * ID_BYTES, of_outputs * outputs * dtype.itemsize)
        ends = [0]
        for size in sizes:
            ends.append(round_up(ends[-1] + size, _ALIGNMENT_BYTES))
        part = round_up(ends[-1] + _FLAG_BYTES, _ALIGNMENT_BYTES)
        flat = torch.zeros(count * part, dtype=torch.uint8, device=parameter.device)
        by_rank = flat.view(count, part)

        def field(number: int, as_dtype: torch.dtype, *shape: int) -> Tensor:
            column = by_rank[:, ends[number] : ends[number] + sizes[number]]
            return column.view(as_dtype).view(count, *shape)

        return cls(
            flat,
            rows=field(0, dtype, tokens, inputs),
            ids=field(1, torch.int32, num_ids),
            outputs=field(2, dtype, of_outputs, outputs),
            flags=by_rank[:, ends[-1] : ends[-1] + _FLAG_BYTES],
        )
