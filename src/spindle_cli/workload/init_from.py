"""`init_from` in a workload file: the files that initial values are taken from. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from spindle_cli.files.artifact import Model, require_known_keys, shown

STAR = "*"
_REGULAR = "^"


@dataclass(frozen=True)
class Pattern:
    """A glob or a regular expression that fits names of tensors."""

    text: str

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        if self.text.startswith(_REGULAR):
            return re.compile(self.text)
        return re.compile("(.*?)".join(map(re.escape, self.text.split(STAR))), re.DOTALL)

    @property
    def is_regular(self) -> bool:
        """Whether it is a regular expression."""
        return self.text.startswith(_REGULAR)

    def matches(self, name: str) -> bool:
        """Whether it is of this name."""
        return self._compiled.fullmatch(name) is not None

    def renamed(self, name: str, replacement: str) -> str | None:
        """Return the name that `replacement` makes of this one; None where the pattern is not of it.

        In the replacement of a glob the first `*` is what the glob's first stands for, and so on; in that of
        a regular expression `\\1` is what its first group has found.
        """
        match = self._compiled.fullmatch(name)
        if match is None:
            return None
        if self.is_regular:
            return match.expand(replacement)
        texts = iter(match.groups())
        return "".join(next(texts) if part == STAR else part for part in re.split(r"(\*)", replacement))


def require_pattern(text: str) -> str:
    """Return a pattern as it is.

    Raises:
        ValueError: it is empty, or a regular expression that Python does not take.
    """
    if not text:
        raise ValueError("expected a pattern of names, such as 'model.*'")
    try:
        Pattern(text).matches("")
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return text


def require_replacement(pattern: str, replacement: str) -> None:
    """Check what names are replaced by.

    Raises:
        ValueError: it asks for more, or less, than the pattern finds.
    """
    if not replacement:
        raise ValueError(f"{shown(pattern)}: expected the name that takes its place; found nothing")
    if not pattern.startswith(_REGULAR):
        stars, used = pattern.count(STAR), replacement.count(STAR)
        if stars != used:
            raise ValueError(f"{shown(pattern)} has {stars} of '*', but {shown(replacement)} has {used}")
        return
    try:
        re.compile(f"(?:{pattern})|").match("").expand(replacement)  # type: ignore[union-attr]  # "" always matches
    except (re.error, IndexError) as error:
        raise ValueError(f"{shown(replacement)} does not go with {shown(pattern)}: {error}") from error


PatternText = Annotated[str, AfterValidator(require_pattern)]


class InitSource(Model):
    """A file of tensors, or a folder of them.

    Attributes:
        path: a safetensors file, or a folder with model.safetensors, or with shards and their
            model.safetensors.index.json, as Hugging Face's `save_pretrained` writes it, or with PEFT's
            adapter_model.safetensors; relative to the workload file.
        names: pattern of names in the file -> the workload's names for them, '<task>.<name in its module>';
            the first that matches counts. Empty: the names are the workload's.
        only: of the names in the file, those that are taken.
        skip: of these, what the workload has no place for.
        missing: names of the workload that no file need have: they keep the values that build gave them.
        round: values are rounded to the workload's dtypes where these have fewer bits.
    """

    path: Annotated[str, Field(min_length=1)]
    names: dict[PatternText, str] = Field(default_factory=dict)
    only: tuple[PatternText, ...] | None = None
    skip: tuple[PatternText, ...] = ()
    missing: tuple[PatternText, ...] = ()
    round: bool = False

    @model_validator(mode="before")
    @classmethod
    def _a_path_alone_or_known_keys(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"path": data}
        require_known_keys(data, cls.model_fields)
        return data

    @field_validator("names", mode="after")
    @classmethod
    def _replacements_fit(cls, names: dict[str, str]) -> dict[str, str]:
        for pattern, replacement in names.items():
            require_replacement(pattern, replacement)
        return names

    @field_validator("only", "skip", "missing", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"expected a list of patterns, such as [{shown(value)}]")
        return value


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str | dict) else value


def _also_one(schema: dict[str, Any]) -> None:
    """A path, a source, or a list of either."""
    one = [{"type": "string", "minLength": 1}, schema.pop("items")]
    schema.pop("type")
    schema["anyOf"] = [*one, {"type": "array", "items": {"anyOf": one}}]


InitSources = Annotated[
    tuple[InitSource, ...], BeforeValidator(_one_or_more), Field(json_schema_extra=_also_one)
]


@dataclass(frozen=True)
class InitFrom:
    """The sources of a workload file. `file`: the workload file, for messages; `folder`: it is in."""

    file: str = ""
    folder: Path = Path()
    sources: tuple[InitSource, ...] = ()

    def place(self, index: int) -> str:
        """Say how messages name a source."""
        return f"{self.file}: init_from[{index}]"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files or folders of all sources."""
        return tuple(map(self.path, range(len(self.sources))))

    def path(self, index: int) -> Path:
        """Return the file or folder of a source."""
        return self.folder / self.sources[index].path
