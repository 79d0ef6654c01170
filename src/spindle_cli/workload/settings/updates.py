"""How a workload file says that parameters are updated: by which optimizers, in which groups, at which
learning rates, with which weights of tasks, scale of losses, and average of the weights. No torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from spindle_cli.files.artifact import Model, require_known_keys, shown

# 'element-wise': it keeps, and steps, each element of a parameter by itself. 'whole': it looks at a parameter
# as a whole (a matrix, its rows), at each by itself.
Contract = Literal["element-wise", "whole"]
_PATH = r"^([A-Za-z_][A-Za-z0-9_.]*|[^:]*[^:/]\.py):[A-Za-z_][A-Za-z0-9_]*$"
# Bytes of optimizer state over bytes of parameters, of torch's optimizers that step each element by itself.
STATE_PER_PARAM = {
    "SGD": 0.0,
    "Adam": 2.0,
    "AdamW": 2.0,
    "NAdam": 2.0,
    "RAdam": 2.0,
    "Adamax": 2.0,
    "Adagrad": 1.0,
    "RMSprop": 1.0,
    "Adadelta": 2.0,
    "ASGD": 1.0,
    "Rprop": 2.0,
}
# Of those that look at whole matrices, for a matrix.
_WHOLE_STATE_PER_PARAM = {"Muon": 1.0}
# Where nothing is known.
_USUAL_STATE = 2.0
NO_DECAY = "no_decay"
REST = "rest"
# What a list of groups may name in one word.
_WORDS: dict[str, dict[str, Any]] = {
    NO_DECAY: {
        "name": NO_DECAY,
        "kinds": ["norms", "biases", "embeddings"],
        "optimizer_args": {"weight_decay": 0.0},
    },
    REST: {"name": REST, "rest": True},
}
# Arguments that may be lists, with an entry for each optimizer group in the order of the groups, as in torch.
_BY_GROUP = ("lr_lambda", "max_lr", "base_lr", "max_momentum", "base_momentum")


def _is_path(value: object) -> object:
    if isinstance(value, str) and re.search(_PATH, value) is None:
        raise ValueError("expected package.module:name or path/to/file.py:name")
    return value


# 'package.module:Name' or 'path/to/file.py:Name', from the folder of the workload file.
ImportPath = Annotated[str, Field(pattern=_PATH), BeforeValidator(_is_path)]


class OptimizerChoice(Model):
    """An optimizer and its numbers, for all or some of the parameters.

    `name`: of the optimizer group; None: there is one for all parameters. `optimizer`: a class of torch.optim
    by name, or any by import path. `contract`: what the file says of the latter. `place`: its key in the
    file, for messages.
    """

    name: str | None
    optimizer: str
    lr: float
    arguments: dict[str, Any]
    contract: Contract | None
    place: str

    @property
    def key(self) -> str:
        """Where the file says which optimizer, for messages."""
        return f"{self.place}.optimizer" if self.name is None else f"{self.place}: optimizer"

    @property
    def is_imported(self) -> bool:
        """Whether the class is not torch's."""
        return ":" in self.optimizer

    @property
    def treats_elements_alone(self) -> bool:
        """Whether it is known to keep nothing but numbers and tensors of a parameter's shape."""
        return self.contract == "element-wise" if self.is_imported else self.optimizer in STATE_PER_PARAM

    @property
    def steps_parameters_alone(self) -> bool:
        """Whether it is known to step each parameter by itself, so that it may step some at a time.

        Of torch's own those are that do so even with elements. A class of the user's may count its steps, or
        do something else once in each.
        """
        return not self.is_imported and self.optimizer in STATE_PER_PARAM

    @property
    def state_per_param(self) -> float:
        """Bytes of its state per byte of what it steps; a guess for a class that is not torch's."""
        state = STATE_PER_PARAM.get(self.optimizer, _WHOLE_STATE_PER_PARAM.get(self.optimizer, _USUAL_STATE))
        if self.optimizer == "SGD" and self.arguments.get("momentum"):
            state = 1.0
        if self.arguments.get("amsgrad"):
            state += 1.0
        return state


Kind = Literal["norms", "biases", "embeddings", "matrices", "vectors"]
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]


class GroupRule(Model):
    """Which trained parameters form an optimizer group, and its settings. A parameter has to fit everything
    that is given of the rule, and one entry of each list.

    Attributes:
        name: Name of the group.
        parameters: Patterns (`*`, `?`, `[...]`) of names, '<task>.<dotted name in the task's module>'; what
            tasks share has a name in each of them, and any will do.
        modules: Classes of the module that has the parameter, by name or as 'package.module:Class';
            subclasses count.
        kinds: `norms`: of a module whose class is called ...Norm or ...Norm2d and the like; `biases`: called
            bias, ..._bias or bias_...; `embeddings`: of a class called ...Embedding, ...Embeddings or
            EmbeddingBag; `matrices`: of two dimensions, without embeddings; `vectors`: of fewer.
        function: Import path of `function(name, parameter) -> bool`, whose parameter has shape and dtype but
            no values.
        excluding: Patterns of names that the group does not take.
        rest: In place of all these, what no other group takes.
        optimizer: As in `train`, whose own is taken without it.
        contract: As in `train`, of an optimizer by import path.
        lr: Learning rate; that of `train` without it.
        optimizer_args: Added to those of `train`; with an optimizer of its own they stand alone.
    """

    name: Annotated[str, Field(min_length=1)]
    parameters: Texts | None = None
    modules: Texts | None = None
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] | None = None
    function: ImportPath | None = None
    excluding: Texts | None = None
    rest: bool = False
    optimizer: Annotated[str, Field(min_length=1)] | None = None
    contract: Contract | None = None
    lr: Annotated[float, Field(gt=0)] | None = None
    optimizer_args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _known_words_and_keys(cls, data: Any) -> Any:
        if isinstance(data, str):
            if data not in _WORDS:
                raise ValueError(
                    f"{shown(data)} is no group by itself; expected {' or '.join(_WORDS)}, or a rule"
                )
            return _WORDS[data]
        require_known_keys(data, cls.model_fields)
        return data

    @model_validator(mode="after")
    def _says_which(self) -> GroupRule:
        chooses = any((self.parameters, self.modules, self.kinds, self.function))
        if self.rest and (chooses or self.excluding):
            raise ValueError(
                f"group {shown(self.name)}: rest: true takes what no other group takes; nothing else"
            )
        if not self.rest and not chooses:
            raise ValueError(
                f"group {shown(self.name)}: expected parameters, modules, kinds or function, or rest: true"
            )
        if self.contract is not None and (self.optimizer is None or ":" not in self.optimizer):
            raise ValueError(
                f"group {shown(self.name)}: contract goes with an optimizer by import path in the same group"
            )
        return self

    @property
    def selects_by(self) -> str:
        """What it takes parameters by, for people."""
        keys = ("parameters", "modules", "kinds", "function", "excluding")
        given = {key: getattr(self, key) for key in keys}
        return ", ".join(
            f"{key}: {value if isinstance(value, str) else ', '.join(value)}"
            for key, value in given.items()
            if value is not None
        )


def groups_of(data: Any) -> Any:
    """Return the list that a file's `groups` stands for: `no_decay` alone is that group and the rest."""
    return [NO_DECAY, REST] if data == NO_DECAY else data


def require_distinct(rules: Sequence[GroupRule]) -> None:
    """Raises ValueError: two rules have one name, or both take the rest."""
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{names.count(name)} groups are named {shown(name)}; give each its own name")
    rests = [rule.name for rule in rules if rule.rest]
    if len(rests) > 1:
        raise ValueError(f"groups {shown(rests[0])} and {shown(rests[1])} both take the rest; one can")


# [[step, weight], ...], steps counted from 0.
Points = tuple[tuple[Annotated[int, Field(ge=0)], float], ...]


def _ascending(points: Points) -> Points:
    steps = [step for step, _ in points]
    if steps != sorted(set(steps)):
        raise ValueError(f"expected [step, weight] by ascending step, each step once; found steps {steps}")
    return points


def _listed(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise ValueError("expected [[step, weight], ...]")
    return value


WeightPoints = Annotated[Points, Field(min_length=1), AfterValidator(_ascending), BeforeValidator(_listed)]
_BY_FUNCTION, _BY_POINTS = "<path>", "<points>"


def _kind(schedule: object) -> str:
    """Tell which of the two kinds is meant, so that a mistake in one is not also told as one in the other."""
    return _BY_FUNCTION if isinstance(schedule, str) else _BY_POINTS


# By task; or the import path of function(step) -> {task: weight}.
TaskWeightSettings = Annotated[
    Annotated[ImportPath, Tag(_BY_FUNCTION)] | Annotated[Mapping[str, WeightPoints], Tag(_BY_POINTS)],
    Discriminator(_kind),
]


def between(points: Sequence[tuple[int, float]], step: int) -> float:
    """Return the weight at a step: linear between two points, and beyond the first and the last as there."""
    first, last = points[0], points[-1]
    if step <= first[0]:
        return first[1]
    for (low, before), (high, after) in itertools.pairwise(points):
        if step <= high:
            share = (step - low) / (high - low)
            return before + share * (after - before)
    return last[1]


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
        """Return what it says for one of the optimizer groups, whose names are given in their order: of
        arguments that are lists with an entry for each group, this group's.

        Raises:
            ValueError: a list has another length.
        """
        of_group = _of_group({"name": self.name, **self.arguments}, index, groups)
        return Schedule.model_validate(of_group)


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
        """Return what the rate `lr` of an optimizer group is multiplied by for an update, counted from 0."""
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
        """Return what these keys say for a run of so many steps; None: nothing."""
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


class Average(Model):
    """An exponential moving average of all trained parameters, beside them.

    Attributes:
        decay: Share of itself that it keeps; the rest is of the parameters as they are then. The first time
            it is the parameters themselves.
        every: It moves after every so many steps.
    """

    decay: Annotated[float, Field(gt=0, lt=1)]
    every: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        require_known_keys(data, cls.model_fields)
        return data


# Of float32, in which the scale and its inverse are; far beyond what float16 gradients can take.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100


class LossScaleSettings(Model):
    """The scale of the losses, and how it changes: the arguments of `torch.amp.GradScaler`.

    Attributes:
        init_scale: The scale at first, from 2^-100 to 2^100.
        growth_factor: What it is multiplied by after `growth_interval` steps in a row without an overflow.
        backoff_factor: What it is multiplied by after a step in which a gradient overflows.
        growth_interval: Steps in a row without an overflow after which it grows.
        fixed: Whether it stays `init_scale`; a number instead of all this is short for it.
    """

    init_scale: float = 65536.0
    growth_factor: Annotated[float, Field(gt=1)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    growth_interval: Annotated[int, Field(ge=1, lt=2**31)] = 2000
    fixed: bool = False

    @model_validator(mode="before")
    @classmethod
    def _a_number_is_fixed(cls, data: Any) -> Any:
        if isinstance(data, int | float) and not isinstance(data, bool):
            return {"init_scale": data, "fixed": True}
        if not isinstance(data, dict | LossScaleSettings):
            raise ValueError("expected a number (the scale then never changes), or a dict of settings")
        require_known_keys(data, cls.model_fields)
        return data

    @field_validator("init_scale")
    @classmethod
    def _a_scale_and_its_inverse_are_numbers(cls, value: float) -> float:
        if not _SMALLEST <= value <= _LARGEST:
            raise ValueError("expected a number from 2^-100 to 2^100")
        return value

    @model_validator(mode="after")
    def _a_fixed_one_has_no_rules(self) -> LossScaleSettings:
        usual = LossScaleSettings.model_fields
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            if self.fixed and getattr(self, name) != usual[name].default:
                raise ValueError(f"{name}: a fixed scale never changes; leave it out, or `fixed`")
        return self
