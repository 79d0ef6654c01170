"""Optimizer groups: rules that say which parameters have which optimizer settings. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from spindle_cli.files.artifact import Model, require_known_keys
from spindle_cli.files.parsing import shown
from spindle_cli.workload.settings.optimizers import Contract, ImportPath

Kind = Literal["norms", "biases", "embeddings", "matrices", "vectors"]
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]

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
    """The list that a file's `groups` stands for: `no_decay` alone is that group and the rest."""
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
