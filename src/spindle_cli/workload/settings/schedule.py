"""How the learning rate changes from step to step, as a workload file says it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from spindle_cli.files.artifact import Model

# Arguments that may be lists, with an entry for each optimizer group in the order of the groups, as in torch.
_BY_GROUP = ("lr_lambda", "max_lr", "base_lr", "max_momentum", "base_momentum")


class Schedule(Model):
    """How the learning rate changes from step to step; all other keys are keyword arguments of the class,
    counted in steps where the class says epochs.

    Attributes:
        name: A class of torch.optim.lr_scheduler.
    """

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)]

    @property
    def arguments(self) -> dict[str, Any]:
        """The class's keyword arguments besides the optimizer."""
        return dict(self.model_extra or {})

    def of_group(self, index: int, groups: Sequence[str | None]) -> Schedule:
        """What it says for one of the optimizer groups, whose names are given in their order: of arguments
        that are lists with an entry for each group, this group's.

        Raises:
            ValueError: a list has another length.
        """
        found = _of_group({"name": self.name, **self.arguments}, index, groups)
        return Schedule.model_validate(found)


def _of_group(said: Mapping[str, Any], index: int, groups: Sequence[str | None]) -> dict[str, Any]:
    made = dict(said)
    for key in _BY_GROUP:
        value = said.get(key)
        if not isinstance(value, list):
            continue
        if len(value) != len(groups):
            there_are = f"there are {len(groups)} groups ({', '.join(map(str, groups))})"
            there_are = there_are if len(groups) > 1 else "there is one group"
            raise ValueError(
                f"schedule: {key} is a list of {len(value)}, and {there_are}: expected an entry for each, in "
                "the order of `groups`"
            )
        made[key] = value[index]
    if isinstance(parts := said.get("schedulers"), list):
        made["schedulers"] = [
            _of_group(part, index, groups) if isinstance(part, dict) else part for part in parts
        ]
    return made


Decay = Literal["linear", "cosine", "constant"]


@dataclass(frozen=True)
class Ramp:
    """A learning rate that is warmed up and then decays.

    Attributes:
        warmup_steps: the first so many updates have less than the whole rate.
        decay: from there on.
        end: the number of the first update (counted from 0) that has the last rate; all after it have it too.
        min_lr: that rate; None: `final_fraction` of the group's own.
    """

    warmup_steps: int
    decay: Decay
    end: int
    min_lr: float | None
    final_fraction: float

    def factor(self, update: int, lr: float) -> float:
        """What the rate `lr` of an optimizer group is multiplied by for an update, counted from 0."""
        if update < self.warmup_steps:
            return (update + 1) / (self.warmup_steps + 1)
        if self.decay == "constant":
            return 1.0
        last = self.final_fraction if self.min_lr is None else self.min_lr / lr
        done = min(1.0, (update - self.warmup_steps) / (self.end - self.warmup_steps))
        if self.decay == "linear":
            return 1 - (1 - last) * done
        return last + (1 - last) * (1 + cos(pi * done)) / 2


class RampSettings(Model):
    """Warm-up and decay of the learning rate, as keys of `train`, in place of `schedule`.

    Attributes:
        warmup_steps: W: update k, counted from 0, has (k + 1) / (W + 1) of the rate for k < W, and update W
            all of it.
        decay: How the rate falls from there on; `constant`, or without it: not at all.
        decay_steps: The update that would have the last rate; the run's last update is the one before.
            Absent: `steps`.
        min_lr: The last rate, of every group.
        final_fraction: The last rate as a share of each group's own; without both it is 0.
    """

    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    decay: Decay | None = None
    decay_steps: Annotated[int, Field(ge=1)] | None = None
    min_lr: Annotated[float, Field(ge=0)] | None = None
    final_fraction: Annotated[float, Field(ge=0, le=1)] | None = None

    def ramp_to(self, steps: int) -> Ramp | None:
        """What these keys say for a run of so many steps; None: nothing."""
        if self.warmup_steps is None and self.decay is None:
            return None
        end = steps if self.decay_steps is None else self.decay_steps
        decay = self.decay or "constant"
        # Without a decay the end of the run means nothing.
        return Ramp(
            self.warmup_steps or 0,
            decay,
            0 if decay == "constant" else end,
            self.min_lr,
            self.final_fraction or 0.0,
        )

    def require_sound(self, steps: int, schedule: Schedule | None, rates: Mapping[str | None, float]) -> None:
        """Refuse keys that contradict each other.

        Args:
            rates: of the optimizer groups, by name.

        Raises:
            ValueError: they do.
        """
        given = [key for key in RampSettings.model_fields if getattr(self, key) is not None]
        if given and schedule is not None:
            raise ValueError(f"{given[0]} and schedule both say how the learning rate changes; give one")
        decays = self.decay in ("linear", "cosine")
        for key in ("decay_steps", "min_lr", "final_fraction"):
            if key in given and not decays:
                raise ValueError(f"{key} goes with decay: linear or cosine")
        if self.min_lr is not None and self.final_fraction is not None:
            raise ValueError("min_lr and final_fraction both say where the decay ends; give one")
        for name, rate in rates.items():
            if self.min_lr is not None and self.min_lr > rate:
                group = "" if name is None else f" of group {name!r}"
                raise ValueError(f"min_lr {self.min_lr:g} is more than lr {rate:g}{group}")
        ramp = self.ramp_to(steps)
        if ramp is not None and decays and ramp.warmup_steps >= ramp.end:
            key = "steps" if self.decay_steps is None else "decay_steps"
            raise ValueError(f"warmup_steps {ramp.warmup_steps} leaves nothing to decay: {key} is {ramp.end}")
