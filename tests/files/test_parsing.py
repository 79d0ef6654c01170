"""Text to data, strictly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spindle_cli.errors import InputError
from spindle_cli.files import artifact
from spindle_cli.files.artifact import MAX_DEPTH, parse_json, parse_yaml, shown


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


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def test_text_may_be_nested_so_deep_and_no_deeper() -> None:
    assert parse_yaml(nested(MAX_DEPTH), where="x")
    with pytest.raises(InputError, match=f"x:1:{MAX_DEPTH + 1}: nested more than {MAX_DEPTH} levels deep"):
        parse_yaml(nested(MAX_DEPTH + 1), where="x")


@pytest.mark.parametrize("text", [nested(30_000), "- " * 30_000 + "x", "? " * 30_000 + "x", "[" * 100_000])
def test_nesting_that_would_end_the_process_is_refused_at_once(text: str) -> None:
    for parse in (parse_yaml, parse_json):
        with pytest.raises(InputError):
            parse(text, where="x")


def test_an_alias_counts_as_what_it_stands_for() -> None:
    """Nine levels of nine aliases each: 4 KB that stand for 10^9 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    with pytest.raises(InputError, match="values, what aliases stand for counted each time"):
        parse_yaml("\n".join(lines), where="x")
    assert len(parse_yaml("\n".join(lines[:3]), where="x")["a2"]) == 9


def test_values_are_counted_with_their_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    """One mapping, two keys, a list of two numbers, and the alias to it: 1 + 2 + 3 + 3."""
    text = "a: &a [1, 2]\nb: *a"
    monkeypatch.setattr(artifact, "MAX_VALUES", 9)
    assert parse_yaml(text, where="x") == {"a": [1, 2], "b": [1, 2]}
    monkeypatch.setattr(artifact, "MAX_VALUES", 8)
    with pytest.raises(InputError, match="x:2:4: more than 8 values"):
        parse_yaml(text, where="x")


@pytest.mark.parametrize(
    "value", ["!!bool maybe", "!!timestamp x", "!!python/name:os.system", "!mine {a: 1}"]
)
def test_tags_are_refused_with_their_place(value: str) -> None:
    with pytest.raises(InputError, match=r"x:1:4: the tag .* is not read"):
        parse_yaml(f"a: {value}", where="x")


def test_dates_are_texts() -> None:
    assert parse_yaml("[2026-11-22, 2026-13-45]", where="x") == ["2026-11-22", "2026-13-45"]


def test_half_a_character_is_refused() -> None:
    assert parse_json('"\\ud83d\\ude00"', where="x") == "\U0001f600"
    with pytest.raises(InputError, match="half a character"):
        parse_json('{"name": "\\ud800"}', where="x")


@given(plain(st.text(max_size=400)) | st.lists(st.integers(), min_size=200) | st.integers(min_value=10**60))
def test_what_is_shown_of_a_value_is_short(data: object) -> None:
    assert len(shown(data)) < 3000
    assert shown({"a": [1, "b"]}) == repr({"a": [1, "b"]})
