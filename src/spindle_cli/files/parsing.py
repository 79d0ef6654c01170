"""JSON and YAML text to plain data, strictly: keys given twice and infinite numbers are refused."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import yaml

from spindle_cli.errors import InputError

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
                problem = f"the key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


# PyYAML follows YAML 1.1, where an exponent needs a dot and a sign.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def parse_yaml(text: str, *, where: str) -> Any:
    """Plain data from YAML; `where` names the text's origin in messages.

    Raises:
        InputError: not valid YAML, or a key given twice; says the line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise InputError(f"{place}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{where}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise InputError(f"{where}: nested too deeply") from error


def parse_json(text: str, *, where: str) -> Any:
    """Plain data from JSON; `where` names the text's origin in messages.

    Raises:
        InputError: not valid JSON, a key given twice, NaN, or a number beyond float's range.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite
        )
    except json.JSONDecodeError as error:
        raise InputError(f"{where}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from error
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON: {error}") from error
    except RecursionError as error:
        raise InputError(f"{where}: nested too deeply") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice in one object")
    return mapping


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that JSON has; expected a finite number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large; expected a finite number")
    return number
