"""A loss that compares samples, evaluated by the shares that it is trained by.

In a batch of which every share has samples each computes its part, from its own rows of the pairs, as in
training. Where a share has none, or the loss cannot be cut as it is evaluated (it also gives something beside
it, or is of one sample), what the loss takes is gathered, and every share computes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import nn

from spindle_cli.operators.batch_dependent import PairsOverShares
from spindle_cli.operators.tensor_group import TensorGroup
from spindle_cli.runtime.communication.rows import Samples
from spindle_cli.runtime.communication.wiring import WiredSlice
from spindle_cli.workload.graph import Op, ValueSpec

if TYPE_CHECKING:
    from torch import Tensor


def gathers(wired: WiredSlice) -> bool:
    """Whether a slice holds a loss that needs all samples, and has the communicator to gather them."""
    last = wired.ops[-1]
    return wired.layout.sums_shares and last.is_loss and (last.contrasts or last.coupled)


@dataclass
class GatheredLoss:
    """One share's side of such a loss; every share takes part in every batch.

    `module`: of the whole loss. `group`: of the shares.
    """

    module: nn.Module
    wired: WiredSlice
    group: TensorGroup
    _cut: dict[tuple[int, ...], PairsOverShares | None] = field(default_factory=dict)

    @property
    def op(self) -> Op:
        """The op that computes the loss."""
        return self.wired.ops[-1]

    def run(
        self, size: int, there: Samples, tensors: Sequence[Tensor], counts: Sequence[Any]
    ) -> tuple[Tensor | None, list[Tensor]]:
        """This share's part of the loss of a batch of `size` samples, if it has any of it; and its own rows
        of what the loss gives beside it.

        Args:
            there: samples of the share that are there.
            tensors: its rows of what the loss takes, fields first.
            counts: what the loss counts of the batch.
        """
        cuts = self._cuts(size)
        part = self._by_shares(cuts, there, tensors, counts)
        if part is not None:
            return part, []
        whole = [self._whole(tensor, spec, cuts) for tensor, spec in zip(tensors, self._specs(), strict=True)]
        given = self.module(*whole, 1.0, *counts)
        loss, *results = given if self.op.results else (given,)
        return loss if self.group.member == 0 else None, [result[there[0] : there[1]] for result in results]

    def _cuts(self, size: int) -> tuple[int, ...]:
        """Where shares begin and end, among the samples that are there."""
        layout = self.wired.layout
        return (0, *(min(layout.rows(share)[1], size) for share in range(layout.dp)))

    def _by_shares(
        self, cuts: tuple[int, ...], there: Samples, tensors: Sequence[Tensor], counts: Sequence[Any]
    ) -> Tensor | None:
        """The share's part from its own rows; None where the loss is not cut. All shares decide alike."""
        if not self.op.contrasts or self.op.results or len(set(cuts)) < len(cuts) or cuts[-1] < 2:
            return None
        if cuts not in self._cut:
            self._cut[cuts] = PairsOverShares(self.module, self.wired.task, self.op, self.group, cuts)
        shares = self._cut[cuts]
        if shares is None:
            return None
        told = ((there[1] - there[0]) / cuts[-1], *counts)
        if not shares.may_be_cut(*tensors, *told):
            self._cut[cuts] = None
            return None
        part: Tensor = shares(*tensors, *told)
        return part

    def _specs(self) -> list[ValueSpec]:
        task, op = self.wired.task, self.op
        return [*(task.fields[name] for name in op.fields), *(task.values[name] for name in op.inputs)]

    def _whole(self, share: Tensor, spec: ValueSpec, cuts: tuple[int, ...]) -> Tensor:
        if spec.batch_dim is None:
            return share
        rows = [(last - first) * spec.rows_per_sample for first, last in pairwise(cuts)]
        return self.group.gather(share.movedim(spec.batch_dim, 0).contiguous(), rows).movedim(
            0, spec.batch_dim
        )
