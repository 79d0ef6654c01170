"""What ops of several keys use: a plan says the same of it wherever it is used."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.check.run import check_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan

KEYS = ("a/net", "b/head")


def planned() -> Plan:
    """Words that the first op of one task and the only op of another use."""
    words = {"op": 0, "parameter": "words", "num_bytes": 2**20, "keys": KEYS}
    more = {"extra_param_bytes": {0: 2**20}, "tied": (words,)}
    nets = [
        metaop_of(key, num_ops, {1: 3.0, 2: 2.0}, **more) for key, num_ops in zip(KEYS, (2, 1), strict=True)
    ]
    return make_plan(profile_of(*nets), cluster_of(2))


def violations(**edit: Any) -> list[str]:
    """Of the plan with something else said of the words where the second task uses them."""
    data = planned().model_dump(mode="json", by_alias=True)
    data["metaops"][1]["tied"][0] |= edit
    found = check_plan(Plan.model_validate(data))
    return [f"{each.where}: {each.value}; {each.expected}" for each in found if each.rule == "tied"]


def test_what_is_said_alike_is_sound() -> None:
    assert check_plan(planned()) == ()
    assert violations(keys=list(KEYS), num_bytes=2**20, is_trained=True) == []


PLACE = "metaops, b/head.tied[0]"


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (
            {"num_bytes": 2**19},
            f"{PLACE}: 'words' with num_bytes 524288; 1048576, as another op says",
        ),
        (
            {"is_trained": False},
            f"{PLACE}: 'words' with is_trained false; true, as another op says",
        ),
        (
            {"keys": ["b/head"]},
            f"{PLACE}: 'words' with keys b/head; a/net, b/head, as another op says",
        ),
        (
            {"is_split_by_any": True},
            f"{PLACE}: 'words' with is_split_by_any true; "
            "false: whether is_split of any op that uses it is true",
        ),
    ],
)
def test_each_way_to_say_it_otherwise_is_named(edit: dict[str, Any], expected: str) -> None:
    assert violations(**edit) == [expected]


def test_an_op_s_own_key_is_among_those_that_use_it() -> None:
    own, other = sorted(violations(parameter="others", keys=["a/net"]), reverse=True)[:2]
    assert own == f"{PLACE}: 'others' of keys a/net; 'b/head' among them, as this op uses it"
    assert other.startswith(f"{PLACE}: 'others' of key 'a/net'")


def test_what_another_key_is_said_to_use_it_says_too() -> None:
    data = planned().model_dump(mode="json", by_alias=True)
    data["metaops"][1]["tied"] = []
    (found,) = check_plan(Plan.model_validate(data))
    assert (found.rule, found.where) == ("tied", "metaops, a/net.tied[0]")
    assert found.value == "'words' of key 'b/head'"
    assert found.expected == "an op with this key that says the same of it; none does"


def test_one_op_that_splits_it_has_all_say_so() -> None:
    """Of the first op, that does not: both have to say that any does."""
    found = violations(is_split=True, is_split_by_any=True)
    assert found == [
        "metaops, a/net.tied[0]: 'words' with is_split_by_any false; "
        "true: whether is_split of any op that uses it is true"
    ]
