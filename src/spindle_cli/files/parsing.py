"""JSON and YAML text to plain data, strictly and within limits.

Keys given twice, infinite numbers and YAML's tags are refused; so is what no file of ours needs and what
would take a machine down: text nested deeper, longer or with more values than the limits below. They are at
least ten times what the largest plan of the benchmarks has (1,024 devices; 8 levels deep).
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from typing import Any

import yaml

from spindle_cli.errors import InputError

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
