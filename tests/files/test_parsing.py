"""Text to data, strictly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spindle_cli.errors import InputError
from spindle_cli.files.parsing import parse_json, parse_yaml


def plain(text: st.SearchStrategy[str]) -> st.SearchStrategy[object]:
    """Anything that JSON can say, with such texts and keys."""
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        st.none() | st.booleans() | numbers | text,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
        max_leaves=12,
    )


@given(plain(st.text()))
def test_json_reads_back_what_json_writes(data: object) -> None:
    assert parse_json(json.dumps(data), where="x") == data


@given(plain(st.text(st.characters(max_codepoint=126))))
def test_json_is_yaml(data: object) -> None:
    assert parse_yaml(json.dumps(data), where="x") == data


@given(st.text(max_size=60))
def test_any_text_is_data_or_one_error(text: str) -> None:
    for parse in (parse_json, parse_yaml):
        try:
            parse(text, where="x")
        except InputError as error:
            assert str(error).startswith("x")


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("1E5", 1e5), ("-2.5e+3", -2500.0), (".5e1", 5.0), ("1e5x", "1e5x")]
)
def test_exponents_are_numbers_as_in_yaml_1_2(text: str, value: object) -> None:
    assert parse_yaml(f"lr: {text}", where="x") == {"lr": value}


def test_a_key_given_twice_is_refused_with_its_place() -> None:
    with pytest.raises(InputError, match=r"plan\.yaml:3:1: .*'lr' is given twice"):
        parse_yaml("lr: 1\nsteps: 2\nlr: 3\n", where="plan.yaml")


def test_a_merged_key_may_be_overridden() -> None:
    text = "base: &base {x: 1, y: 2}\nmine: {<<: *base, x: 3}"
    assert parse_yaml(text, where="x")["mine"] == {"x": 3, "y": 2}
