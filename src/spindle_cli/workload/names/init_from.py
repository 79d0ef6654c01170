"""`init_from` in a workload file: the files that initial values are taken from. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from spindle_cli.files.artifact import Model, require_known_keys
from spindle_cli.files.parsing import shown
from spindle_cli.workload.names.patterns import require_pattern, require_replacement

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
        """How messages name a source."""
        return f"{self.file}: init_from[{index}]"

    def path(self, index: int) -> Path:
        """Where a source is."""
        return self.folder / self.sources[index].path
