"""Files that one stage hands to the next: JSON and YAML parsed strictly and within limits, versioned,
validated, written whole or not at all.

Keys given twice, infinite numbers and YAML's tags are refused; so is what no file of ours needs and what
would take a machine down: text nested deeper, longer or with more values than the limits below. They are at
least ten times what the largest plan of the benchmarks has (1,024 devices; 8 levels deep).

Every file is JSON or YAML with a key `schema: spindle.<kind>/<major>`. Its Python type is a frozen pydantic
model derived from `Artifact`; the JSON Schemas under `schemas/` are generated from those types.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

from spindle_cli.errors import InputError
from spindle_cli.files.writing import write_text
from spindle_cli.units import counted

MAX_BYTES = 256 * 2**20  # of a file's text
MAX_DEPTH = 100  # mappings and lists inside each other
MAX_VALUES = 10_000_000  # in YAML, what aliases stand for counted each time

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]  # the base is chosen at run time
    """The safe loader, with YAML 1.2's floats ('1e-3' is a number) and without repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raises yaml's ConstructorError at a key that the mapping has already."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:  # before the base class merges `<<` keys in, which may be overridden
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                problem = f"the key {shown(key.value)} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


# A date is a text: nothing of ours is one, and YAML's readers fail on impossible ones.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
# PyYAML follows YAML 1.1, where an exponent needs a dot and a sign.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def parse_yaml(text: str, *, where: str) -> Any:
    """Plain data from YAML; `where` names the text's origin in messages.

    Raises:
        InputError: not valid YAML, a key given twice, a tag, or beyond the limits; says the line and column.
    """
    try:
        _check_events(text, where)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise InputError(f"{place}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{where}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise InputError(f"{where}: nested too deeply") from error


def _check_events(text: str, where: str) -> None:
    """Refuse what is beyond the limits before anything is built of it: libyaml's own reader calls itself for
    each level, and ends the process where that goes too deep.

    Raises:
        InputError: saying the line and column.
    """
    total = 0
    anchored: dict[str | None, int] = {}  # values that an alias to it stands for
    begun: list[tuple[str | None, int]] = []  # the anchor of each open mapping and list, `total` before it
    for event in yaml.parse(text, Loader=_Base):
        if isinstance(event, yaml.ScalarEvent):
            total += 1
            if event.anchor is not None:
                anchored[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            begun.append((event.anchor, total))
            total += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = begun.pop()
            if anchor is not None:
                anchored[anchor] = total - before
        elif isinstance(event, yaml.AliasEvent):
            total += anchored.get(event.anchor, 1)
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise InputError(f"{_place(where, event)}: the tag {shown(tag)} is not read", hint=_NO_TAGS)
        if len(begun) > MAX_DEPTH:
            raise InputError(f"{_place(where, event)}: nested more than {MAX_DEPTH} levels deep")
        if total > MAX_VALUES:
            few = f"more than {MAX_VALUES:,} values, what aliases stand for counted each time"
            raise InputError(f"{_place(where, event)}: {few}")


def _place(where: str, event: yaml.Event) -> str:
    mark = event.start_mark
    return where if mark is None else f"{where}:{mark.line + 1}:{mark.column + 1}"


_NO_TAGS = "Write the plain value: what starts with '!' is a tag; quote it if a text is meant."


def parse_json(text: str, *, where: str) -> Any:
    """Plain data from JSON; `where` names the text's origin in messages.

    Raises:
        InputError: not valid JSON, a key given twice, NaN, a number beyond float's range, half a character
            (a lone surrogate), or nested too deeply.
    """
    try:
        data = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite
        )
        if "\\u" in text:
            _check_characters(data)
        return data
    except json.JSONDecodeError as error:
        raise InputError(f"{where}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from error
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON: {error}") from error
    except RecursionError as error:
        raise InputError(f"{where}: nested too deeply") from error


def _check_characters(data: Any) -> None:
    """Refuse texts that no file could be written with."""
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ascii(error.object[error.start])
        raise ValueError(f"{code} is half a character (a surrogate without its other half)") from error


def shown(value: Any) -> str:
    """A value for a message: its repr, cut short however large the value is."""
    short = reprlib.Repr()
    short.maxlevel, short.maxdict, short.maxlist, short.maxtuple = 3, 4, 6, 6
    short.maxstring, short.maxlong, short.maxother = 80, 40, 80
    return short.repr(value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shown(twice)} is given twice in one object")
    return mapping


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that JSON has; expected a finite number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shown(text)[1:-1]} is too large; expected a finite number")
    return number


def _a_number(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("expected a number")
    return _no_truth(value)


def _whole_number(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("expected a whole number")
    return _no_truth(value)


def _no_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


# Of what pydantic says of a type, what is no type inside of it.
_NO_TYPES = frozenset({"metadata", "serialization", "config", "default", "expected"})


def _exact(schema: Any) -> Any:
    """What pydantic says of a model, so that a value counts as nothing else: a text or a truth as no number,
    these as no truth. Keys alone may be a number's text, as JSON has no others. What is exact stays as it is.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(map(_exact, schema))
    if not isinstance(schema, dict):
        return schema
    kind, function = schema.get("type"), schema.get("function")
    if isinstance(function, dict) and function.get("function") in (_a_number, _whole_number, _no_truth):
        return schema
    if kind in ("int", "float"):
        return no_info_before_validator_function(_whole_number if kind == "int" else _a_number, schema)
    if kind == "bool":
        return {**schema, "strict": True}
    return {key: _inside(key, value) for key, value in schema.items()}


def _inside(key: str, schema: Any) -> Any:
    if key in _NO_TYPES:
        return schema
    if key == "fields":
        return {name: _exact(field) for name, field in schema.items()}
    if key == "keys_schema" and schema["type"] == "int":
        return no_info_before_validator_function(_no_truth, schema)
    return _exact(schema)


class Model(BaseModel):
    """Base of everything that is inside a file: frozen, finite numbers only.

    Keys that we do not know are kept out but accepted, so that a newer minor version stays readable. A value
    is what it is written as: no text or truth counts as a number, no number or text as true or false.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """What pydantic reads it by."""
        exact: CoreSchema = _exact(handler(source))
        return exact


class Sparse(Model):
    """Base of what there may be very many of in a file: keys that have their defaults are left out."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {name: value for name, value in serialize(self).items() if value != fields[name].default}


class Artifact(Model):
    """Base of everything that is a file of its own."""

    KIND: ClassVar[str]
    MAJORS: ClassVar[tuple[int, ...]] = (1,)

    @classmethod
    def schema_names(cls) -> tuple[str, ...]:
        """What a file's `schema` key may be, e.g. 'spindle.plan/1'."""
        return tuple(f"spindle.{cls.KIND}/{major}" for major in cls.MAJORS)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and validate a file.

        Raises:
            InputError: missing, unreadable, not JSON/YAML, of another kind or version, or with a wrong value.
        """
        return cls.from_data(read_data(path), where=str(path))

    @classmethod
    def from_data(cls, data: Any, *, where: str) -> Self:
        """Validate parsed data; `where` names its origin in messages.

        Raises:
            InputError: of another kind or version, or with a wrong value.
        """
        check_schema(data, cls.schema_names(), where=where)
        return validate(cls, data, where=where)

    def sha256(self) -> str:
        """'sha256:...' of the content: the same for any spelling of the same values.

        Keys at their defaults are left out, so that a version that adds an optional key finds the same.
        """
        return sha256_of(self.model_dump(mode="json", by_alias=True, exclude_defaults=True))


T = TypeVar("T", bound=BaseModel)

# Characters of a mapping or list that a message shows; of a longer one it says the size. What is wrong inside
# of a mapping with more keys names itself.
_MOST_FOUND, _FEW_KEYS = 100, 2
# Of 1, how like a key of ours another one is that is taken for it misspelt.
ALIKE = 0.7


def read_data(path: Path) -> Any:
    """Parse a JSON (by its ending) or YAML file.

    Raises:
        InputError: missing, unreadable, empty, or not parseable; says where in the file.
    """
    try:
        text = _read_bytes(path).decode("utf-8-sig")  # editors on Windows put a mark first
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file", hint="Check the path, or make the file first.") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if not text.strip():
        raise InputError(
            f"{path}: the file is empty", hint="It may have been cut off while being written; make it again."
        )
    parse = parse_json if path.suffix == ".json" else parse_yaml
    return parse(text, where=str(path))


def _read_bytes(path: Path) -> bytes:
    """A file's bytes; at most `MAX_BYTES`, also of what has no size (a pipe, a device).

    Raises:
        InputError: there are more.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise InputError(
            f"{path}: larger than {MAX_BYTES // 2**20} MiB", hint="No file of ours is: is this the right one?"
        )
    return content


def check_schema(data: Any, schemas: Sequence[str], *, where: str) -> None:
    """Refuse data whose `schema` key is missing, of another kind, or of a major version that we do not know.

    Args:
        known: the values that are read.

    Raises:
        InputError: naming what was found and what was expected.
    """
    if not isinstance(data, dict):
        raise InputError(f"{where}: expected a mapping with the key 'schema', found {_kind(data)}")
    schema = data.get("schema")
    if schema in schemas:
        return
    expected = " or ".join(schemas)
    if schema is None:
        raise InputError(f"{where}: the key 'schema' is missing", hint=f"Expected schema: {expected}")
    kind = schemas[0].rsplit("/", 1)[0]
    if isinstance(schema, str) and schema.rsplit("/", 1)[0] == kind:
        version = schema.rsplit("/", 1)[-1]
        raise InputError(
            f"{where}: schema: version {shown(version)} is not known; this spindle reads {expected}",
            hint="Upgrade spindle, or make the file again with this version.",
        )
    raise InputError(
        f"{where}: schema: found {shown(schema)}, expected '{expected}'", hint="Is this the right file?"
    )


def _kind(data: Any) -> str:
    """What data is, in words for messages."""
    if isinstance(data, list):
        return "a list"
    return "nothing" if data is None else "a text" if isinstance(data, str) else shown(data)


def validate(model: type[T], data: Any, *, where: str) -> T:
    """Turn parsed data into its type.

    Raises:
        InputError: the first few wrong places, each with its path in the file, its value and what was
            expected.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = _first_causes(error.errors(include_url=False))
        lines = [_describe_problem(problem) for problem in problems[:5]]
        if len(problems) > 5:
            lines.append(f"and {len(problems) - 5} more")
        raise InputError(f"{where}: " + "\n  ".join(lines)) from error


def require_known_keys(data: Any, allowed: Iterable[str]) -> None:
    """Refuse a mapping's first key that is not among `known`; what is no mapping is let be.

    Raises:
        ValueError: for a validator to hand on.
    """
    names = list(allowed)
    unknown = [key for key in data if key not in names] if isinstance(data, dict) else []
    if unknown:
        raise ValueError(f"unknown key {shown(unknown[0])}; known are {', '.join(names)}")


def require_none_misspelt(model: type[BaseModel], data: Any, *, where: str) -> None:
    """Refuse the first key of parsed data, or of a mapping inside of it, that is nearly one of the model's.

    Args:
        where: the origin of the data, for the message.

    Raises:
        InputError: naming the key, its place, and the one that is meant.
    """
    for place, key, keys in _unknown(model, data, ""):
        meant = get_close_matches(str(key), keys, 1, ALIKE)
        if meant:
            inside = f"{place}: " if place else ""
            raise InputError(f"{where}: {inside}unknown key {shown(key)}; is {meant[0]!r} meant?")


def _unknown(model: type[BaseModel], data: Any, place: str) -> Iterator[tuple[str, Any, list[str]]]:
    """Place, key and known keys of each; data of another kind than expected is passed over."""
    if isinstance(data, list):
        for number, entry in enumerate(data):
            yield from _unknown(model, entry, f"{place}[{number}]")
        return
    if not isinstance(data, dict):
        return
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for key, value in data.items():
        field = fields.get(key)
        if field is None:
            yield place, key, list(fields)
            continue
        for inner in _models_in(field.annotation):
            yield from _unknown(inner, value, f"{place}.{key}" if place else key)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a type is, or is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for part in get_args(annotation):
        yield from _models_in(part)


def _first_causes(problems: list[Any]) -> list[Any]:
    """Without lists that are too short only because what is in them is wrong, which is said anyway."""

    def follows(problem: Any) -> bool:
        place = problem["loc"]
        inside = (nested for nested in problems if nested["loc"][: len(place)] == place)
        return problem["type"] == "too_short" and any(len(nested["loc"]) > len(place) for nested in inside)

    return [problem for problem in problems if not follows(problem)]


# What a value is expected to be, by pydantic's kind of problem; its own words speak of Python.
_EXPECTED = {
    **dict.fromkeys(("dict_type", "mapping_type", "model_type"), "a mapping of keys to values"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "finite_number": "a finite number",
    "string_type": "a text",
    "string_too_short": "a text of {min_length} or more characters",
    **dict.fromkeys(("literal_error", "enum"), "{expected}"),
    "too_short": "{min_length} or more entries",
    "too_long": "{max_length} entries or fewer",
    "greater_than": "a number greater than {gt:.15g}",
    "greater_than_equal": "a number greater than or equal to {ge:.15g}",
    "less_than": "a number less than {lt:.15g}",
    "less_than_equal": "a number less than or equal to {le:.15g}",
}


def _describe_problem(problem: Any) -> str:
    place = ""
    for part in problem["loc"]:
        if part == "[key]" or (isinstance(part, str) and part.startswith("<") and part.endswith(">")):
            continue  # of a mapping, or one of several kinds that a value may be of: no part of the file
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    if problem["type"] == "missing":
        return f"{place}: this {'entry' if isinstance(problem['loc'][-1], int) else 'key'} is missing"
    value, said = problem["input"], _EXPECTED.get(problem["type"])
    if said is not None:
        message = f"expected {said.format(**problem.get('ctx', {}))}{_but_found(value)}"
    else:
        inner, message = _inner_place(problem["msg"].removeprefix("Value error, "), value)
        if place and not inner and not (isinstance(value, dict) and len(value) > _FEW_KEYS):
            message += _but_found(value)
        place += f".{inner}" if place and inner else inner
    return f"{place}: {message}" if place else message


def _but_found(value: Any) -> str:
    """What there is in a file, for the end of a message; of much, how much it is."""
    text = shown(value)
    if len(text) > _MOST_FOUND and isinstance(value, dict | list | tuple):
        is_mapping = isinstance(value, dict)
        text = f"a mapping of {counted(len(value), 'key')}" if is_mapping else f"a list of {len(value)}"
    return f" (found {text})"


def _inner_place(message: str, value: Any) -> tuple[str, str]:
    """The place inside of a mapping that a message about it begins with ('nodes[1].name: ...'), and the rest;
    '' where it says none.
    """
    inner, colon, rest = message.partition(": ")
    key = re.match(r"\w+", inner)
    if colon and " " not in inner and key and isinstance(value, dict) and key.group() in value:
        return inner, rest
    return "", message


def write_json(path: Path, model: BaseModel) -> None:
    """Write a model as JSON, whole or not at all. Same model, same bytes."""
    write_text(path, to_json(model))


def to_json(model: BaseModel) -> str:
    """A model as indented JSON text with a trailing newline; `None` values are kept."""
    return (
        json.dumps(
            model.model_dump(mode="json", by_alias=True), indent=1, ensure_ascii=False, allow_nan=False
        )
        + "\n"
    )


def to_compact_json(model: BaseModel) -> str:
    """A model as JSON text on one line, with a trailing newline."""
    data = model.model_dump(mode="json", by_alias=True)
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"


def sha256_of(data: Any) -> str:
    """'sha256:...' of data in canonical JSON (sorted keys, no spaces)."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
