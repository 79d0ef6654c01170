"""Which parameters have a gradient in an iteration: those that a backward pass of any rank has reached.

Ranks tell each other by flags, which are summed beside the gradients. For a host to read them is to wait for
its device. A rank whose passes have reached all of its parameters needs none. Nor do the others where passes
reach the same parameters in every step, as those of operators that decide nothing by the values of their
batch: what all ranks found out when a program ran first holds as long as they reach what they reached then. A
rank that finds itself elsewhere reads, and learns whether others have gone by what held before; that would
train another model on them, and ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from spindle_cli.errors import WorkloadError
from spindle_cli.runtime.memory.to_device import on_its_way

if TYPE_CHECKING:
    from torch import Tensor

# Trained parameters that the same passes reach in every step, with their names.
Steady = Mapping[nn.Parameter, str]


class Agreement:
    """What the ranks that share some parameters have found out together of which have a gradient, in each of
    the programs that steps may run.
    """

    def __init__(self, names: Sequence[str | None]) -> None:
        """`names`: of the parameters that are reached alike in every step; None: values decide of it."""
        self._names = tuple(names)
        self._agreed: dict[int, _Agreed] = {}  # by program
        self._program = 0
        self._reached_here: tuple[bool, ...] = ()
        self._trained: tuple[bool, ...] = ()
        self._holds = False

    def turn_to(self, program: int) -> None:
        """Note which of the programs runs from here on."""
        self._program = program

    def tell(self, reached: Sequence[bool], trained: Sequence[bool] | None = None) -> bool:
        """This rank's passes of an iteration have reached these; whether what was found out before holds for
        it, which the others are to be told. `trained`: the parameters that the program trains; None: all.
        """
        self._reached_here = tuple(reached)
        self._trained = tuple([True] * len(reached) if trained is None else trained)
        agreed = self._agreed.get(self._program)
        decided = (name is not None or is_reached for name, is_reached, _ in self._trained_parameters())
        self._holds = agreed is not None and agreed.reached_here == self._steady(reached) and all(decided)
        return self._holds

    def outcome(self, read: Callable[[], Sequence[bool]]) -> Sequence[bool]:
        """Which of the parameters have a gradient. `read`: what all ranks have told: whether any has reached
        each parameter, and last whether for any the outcome of before holds.

        Raises:
            WorkloadError: passes have reached others than before, on some ranks alone.
        """
        agreed = self._agreed.get(self._program)
        if agreed is not None and self._holds:
            steady = dict(zip(self._places(), agreed.reached, strict=True))
            return [steady.get(place, is_reached) for place, is_reached in enumerate(self._reached_here)]
        others_hold = False
        if all(is_reached for _, is_reached, _ in self._trained_parameters()) and (
            agreed is None or all(agreed.reached)
        ):
            reached: Sequence[bool] = self._reached_here
        else:
            *reached, others_hold = read()
        if others_hold:
            assert agreed is not None, "programs run first on all ranks at once"
            self._require_the_same(agreed.reached, self._steady(reached))
        else:
            self._agreed[self._program] = _Agreed(self._steady(self._reached_here), self._steady(reached))
        return reached

    def _trained_parameters(self) -> Iterator[tuple[str | None, bool, int]]:
        """The parameters that the program trains: name, whether this rank has reached it, and its place."""
        for place, (name, is_reached, is_trained) in enumerate(
            zip(self._names, self._reached_here, self._trained, strict=True)
        ):
            if is_trained:
                yield name, is_reached, place

    def _places(self) -> Sequence[int]:
        """The places of the parameters that the program trains and that passes reach alike in every step."""
        return [place for name, _, place in self._trained_parameters() if name is not None]

    def _steady(self, flags: Sequence[bool]) -> tuple[bool, ...]:
        return tuple(flags[place] for place in self._places())

    def _require_the_same(self, before: Sequence[bool], now: Sequence[bool]) -> None:
        for place, was, is_now in zip(self._places(), before, now, strict=True):
            if was == is_now:
                continue
            had, has = ("a gradient", "none") if was else ("no gradient", "one")
            raise WorkloadError(
                f"{self._names[place]}: it had {had} when this run began, and has {has} in this step on some "
                "ranks, though its operators look at no values that could decide of it",
                hint="Decide by numbers that torch draws (torch.rand(()) < p), not by Python's random, which "
                "parts of a model run; or run all of them, and multiply by 0 what is to be left out.",
            )


@dataclass(frozen=True)
class _Agreed:
    """What was found of the parameters that are reached alike in every step: what this rank's passes had
    reached when all ranks found out which have a gradient, and which have.
    """

    reached_here: tuple[bool, ...]
    reached: tuple[bool, ...]


class Reached:
    """Which of some parameters this rank's backward passes have reached in this iteration, and, by flags that
    are summed, or of which the largest is taken, over all ranks, which of them have a gradient.

    `size`: elements that the flags take.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], steady: Steady | None = None) -> None:
        self.flags = [False] * len(parameters)
        self.size = len(parameters) + 1
        self._agreement = Agreement([(steady or {}).get(parameter) for parameter in parameters])
        self.turn_to = self._agreement.turn_to
        # Of autograd, those that accumulate: as long as they are held, they are the parameters' own. Not
        # `register_hook` of the parameters themselves, see `KEEPS_GRADIENT_HOOKS`.
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        for position, node in enumerate(self._nodes):
            node.register_hook(self._note(position))

    def reset(self) -> None:
        """Forget which parameters were reached, for the next iteration."""
        self.flags = [False] * len(self.flags)

    def write_into(self, flags: Tensor, trained: Sequence[bool] | None = None) -> None:
        """1 for each parameter that was reached, 0 for the others; then whether what was found out before
        holds here. `trained`: the parameters that this program trains.
        """
        told = [*self.flags, self._agreement.tell(self.flags, trained)]
        if all(told):
            flags.fill_(1)
        else:
            flags.copy_(on_its_way(torch.tensor(told), flags.device))

    def outcome(self, flags: Tensor) -> Sequence[bool]:
        """Which parameters have a gradient, given the flags of all ranks; raises what `Agreement` does."""
        return self._agreement.outcome(lambda: read_flags(flags))

    def _note(self, position: int) -> Callable[[Sequence[Tensor], Sequence[Tensor | None]], None]:
        def note(_: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
            # A function of the user's may end its way with None, which is no gradient.
            if gradients[0] is not None:
                self.flags[position] = True

        return note


def read_flags(flags: Tensor) -> list[bool]:
    """Flags of all ranks together. The host waits for them."""
    return [flag > 0 for flag in flags.tolist()]
