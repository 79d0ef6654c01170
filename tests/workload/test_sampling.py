"""Which tasks run at which step: by hand, against a second reading of the page, and what is refused."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from helpers.examples import examples
from spindle_cli.errors import WorkloadError
from spindle_cli.training.sampling import Schedule, Turns, drawn_number, sampled_sets, sets_of
from spindle_cli.verify.plain import runs_at
from spindle_cli.workload.file import TrainSettings

NAMES = ("a", "b", "c", "d")


def turns(sampling: Any, names: tuple[str, ...] = NAMES, seed: int = 0) -> Turns:
    return Turns(TrainSettings.model_validate({"sampling": sampling}).sampling, names, seed)


def test_every_second_and_every_third_step() -> None:
    found = turns({"every": {"b": 2, "c": {"every": 3, "offset": 1}}})
    steps = ["".join(found.due(step)) for step in range(8)]
    assert steps == ["abd", "acd", "abd", "ad", "abcd", "ad", "abd", "acd"]
    assert [found.before("b", step) for step in range(6)] == [0, 1, 1, 2, 2, 3]
    assert [found.before("c", step) for step in range(6)] == [0, 0, 1, 1, 1, 2]
    assert [found.before("a", step) for step in range(3)] == [0, 1, 2]


def test_the_sets_and_their_shares_are_those_of_a_period() -> None:
    found = sets_of(turns({"every": {"b": 2, "c": {"every": 3, "offset": 1}}}))
    shares = {"".join(each.tasks): each.share for each in found}
    assert shares == pytest.approx({"ad": 2 / 6, "abd": 2 / 6, "acd": 1 / 6, "abcd": 1 / 6})
    assert [each.share for each in found] == sorted((each.share for each in found), reverse=True)


def test_the_longest_period_is_still_gone_through() -> None:
    found = sets_of(turns({"every": {"b": 10_000, "c": 5_000}}, ("a", "b", "c")))
    shares = {"".join(each.tasks): each.share for each in found}
    assert shares == pytest.approx({"a": 9998 / 1e4, "ac": 1e-4, "abc": 1e-4})
    with pytest.raises(WorkloadError, match="after 10002 steps only, more than 10000"):
        sets_of(turns({"every": {"b": 5001, "c": 2}}, ("a", "b", "c")))


def test_a_draw_is_flattened_by_its_temperature() -> None:
    found = turns({"draw": {"weights": {"b": 16.0, "c": 1.0}, "temperature": 2}})
    assert found.probabilities == pytest.approx({"b": 0.8, "c": 0.2})
    shares = {"".join(each.tasks): each.share for each in sets_of(found)}
    assert shares == pytest.approx({"abd": 0.8, "acd": 0.2})


def test_a_draw_comes_as_often_as_its_probability() -> None:
    found = turns({"draw": {"weights": {"b": 3.0, "c": 1.0}}})
    drawn = Counter(found.due(step) for step in range(4000))
    assert set(drawn) == {("a", "b", "d"), ("a", "c", "d")}
    # Four standard deviations of a draw of 4,000.
    assert drawn["a", "b", "d"] == pytest.approx(3000, abs=4 * math.sqrt(4000 * 0.75 * 0.25))


def test_drawn_numbers_are_those_of_the_page() -> None:
    digits = hashlib.sha256(b"7:0").hexdigest()[:16]
    assert drawn_number(7, 0) == int(format(int(digits, 16), "064b")[:53], 2) / 2**53
    assert drawn_number(7, 0) != drawn_number(7, 1) != drawn_number(8, 1)


def test_the_seed_is_that_of_the_settings_unless_the_draw_has_one() -> None:
    weights = {"weights": dict.fromkeys("abcd", 1.0)}
    by_train = [turns({"draw": weights}, seed=5).due(step) for step in range(20)]
    assert by_train == [turns({"draw": {**weights, "seed": 5}}, seed=1).due(step) for step in range(20)]
    assert by_train != [turns({"draw": weights}, seed=6).due(step) for step in range(20)]


samplings = st.fixed_dictionaries(
    {
        "every": st.dictionaries(
            st.sampled_from("ab"),
            st.integers(1, 6).flatmap(
                lambda k: st.builds(lambda o: {"every": k, "offset": o}, st.integers(0, k - 1))
            ),
            min_size=1,
        ),
    },
    optional={
        "draw": st.fixed_dictionaries(
            {"weights": st.dictionaries(st.sampled_from("cd"), st.floats(0.1, 100), min_size=1)},
            optional={"temperature": st.floats(0.5, 10), "seed": st.integers(0, 9)},
        )
    },
)


@examples(40)
@given(samplings, st.integers(0, 5), st.integers(0, 300))
def test_steps_are_those_of_the_second_reading(sampling: Any, seed: int, stop: int) -> None:
    train = TrainSettings.model_validate({"sampling": sampling, "seed": seed})
    found = Turns(train.sampling, (*NAMES, "e"), seed)
    sets = {each.tasks for each in sets_of(found)}
    counts: Counter[str] = Counter()
    for step in range(stop):
        due = found.due(step)
        assert due == tuple(name for name in found.names if runs_at(train, name, step))
        assert due in sets
        assert {name: found.before(name, step) for name in found.names} == {
            name: counts[name] for name in found.names
        }
        counts.update(due)
    assert sum(each.share for each in sets_of(found)) == pytest.approx(1)


def test_a_task_takes_its_own_batches_one_after_the_other() -> None:
    schedule = Schedule(turns({"every": {"b": {"every": 3, "offset": 1}}}), batches_per_step=2)
    taken = [schedule.own_number("b", number) for number in range(16) if "b" in schedule.of_batch(number)]
    assert taken == [0, 1, 2, 3, 4, 5]
    assert [schedule.own_number("a", number) for number in range(5)] == [0, 1, 2, 3, 4]
    assert schedule.own_numbers(range(2, 5)) == {
        "a": range(4, 10),
        "b": range(2, 4),
        "c": range(4, 10),
        "d": range(4, 10),
    }


def test_every_step_of_all_tasks_needs_no_sets() -> None:
    assert sampled_sets(turns(None)) == ()
    assert sampled_sets(turns({"every": {"a": 1}})) == ()


@pytest.mark.parametrize(
    ("sampling", "names", "said"),
    [
        ({"every": {"x": 2}}, NAMES, "there is no task 'x'; the tasks are a, b, c, d"),
        ({"draw": {"weights": {"x": 1.0}}}, NAMES, "there is no task 'x'"),
        (
            {"every": {"a": 2}},
            ("a",),
            r"no task runs at step 1 \(counted from 0\), nor every 2 steps after it",
        ),
        ({"every": {"a": 9973, "b": 2}}, NAMES, "after 19946 steps only, more than 10000"),
        ({"draw": {"weights": {str(n): 1.0 for n in range(17)}}}, tuple(map(str, range(17))), "17 different"),
    ],
)
def test_what_no_plan_could_be_made_for_is_refused(sampling: Any, names: tuple[str, ...], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        sets_of(turns(sampling, names))


def test_sixteen_sets_are_not_too_many() -> None:
    names = tuple(map(str, range(16)))
    assert len(sets_of(turns({"draw": {"weights": dict.fromkeys(names, 1.0)}}, names))) == 16


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({}, "expected `every`, or `draw`, or both"),
        ({"every": {"a": 0}}, "greater than or equal to 1"),
        ({"every": {"a": {"every": 2, "offset": 2}}}, "offset 2 is not below every: 2"),
        ({"every": {"a": {"evry": 2}}}, "unknown key"),
        ({"every": {"a": 2}, "draw": {"weights": {"a": 1.0}}}, "'a' is in `every` and in `draw`"),
        ({"draw": {"weights": {}}}, "at least 1"),
        ({"draw": {"weights": {"a": 0.0}}}, "greater than 0"),
        ({"draw": {"weights": {"a": 1.0, "b": 1e-300}, "temperature": 0.5}}, "too small for a number"),
        ({"weights": {"a": 1}}, "unknown key 'weights'; known are every, draw"),
    ],
)
def test_settings_that_say_nothing_or_too_much_are_refused(sampling: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainSettings.model_validate({"sampling": sampling})
