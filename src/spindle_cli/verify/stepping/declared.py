"""What a workload does to parameters beside the optimizer, in plain PyTorch, as somebody would write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from spindle_cli.workload.types import Constraint, Workload


@dataclass(frozen=True)
class Declared:
    """What is declared of a workload whose modules are trained in place. `stepped`: by the parameters' ids,
    what the optimizer steps in their place.
    """

    workload: Workload
    stepped: Mapping[int, nn.Parameter]

    @classmethod
    def of(
        cls,
        workload: Workload,
        parameters: Mapping[str, nn.Parameter],
        stepped: Mapping[str, nn.Parameter],
    ) -> Declared:
        """`stepped`: by the same names as `parameters`."""
        return cls(workload, {id(parameter): stepped[name] for name, parameter in parameters.items()})

    @torch.no_grad()
    def constrain(self) -> None:
        """The optimizer has made an update."""
        for constraint in self.workload.constraints:
            for parameter in _trained(constraint):
                stepped = self.stepped[id(parameter)]
                if constraint.clamp is not None:
                    stepped.clamp_(*constraint.clamp)
                elif constraint.unit_norm is not None:
                    stepped.copy_(nn.functional.normalize(stepped, dim=constraint.unit_norm))

    @torch.no_grad()
    def follow(self, when: str, step: int) -> None:
        """Ahead of the forward passes of a step, counted from 0, or behind its update."""
        for follows in self.workload.follows:
            if follows.when != when:
                continue
            decay = _number(follows.decay, step)
            slow, fast = (
                [each] if isinstance(each, nn.Parameter) else list(each.parameters())
                for each in (follows.slow, follows.fast)
            )
            for average, parameter in zip(slow, fast, strict=True):
                average.mul_(decay).add_(parameter, alpha=1 - decay)


def _number(decay: float | Callable[[int], float], step: int) -> float:
    return float(decay(step) if callable(decay) else decay)


def _trained(constraint: Constraint) -> Iterator[nn.Parameter]:
    own = [constraint.of] if isinstance(constraint.of, nn.Parameter) else constraint.of.parameters()
    yield from (each for each in own if each.requires_grad)
