"""`make mutants`: which bugs there are, how the sample is drawn, which tests a bug meets, where it is put."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="mutmut is not installed (pip install 'spindle-cli[dev]')")

from mutants.choosing import choose
from mutants.excuses import PATH, read_excuses
from mutants.making import File, Mutant
from mutants.records import Record, Records
from mutants.results import Result, Results
from mutants.sampling import sample
from mutants.trees import Tree
from mutants.trying import Bug

FILE = Path("src/spindle_cli/costs/little.py")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept between runs is kept under the working folder."""
    monkeypatch.chdir(tmp_path)


def changes(text: str) -> set[str]:
    """What the mutants of one function's line make of it."""
    file = File(FILE, f"def f(a, b):\n    {text}\n")
    return {file.mutated(mutant).splitlines()[1].strip() for mutant in file.mutants}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("return a * b", {"return a / b", "return a", "return b"}),
        ("return a - b", {"return a + b", "return a"}),
        ("return a < 2", {"return a <= 2", "return a < 3", "return a < 1"}),
        ("return max(a, b)", {"return min(a, b)"}),
        (
            "return a if b else 0.5",
            {"return a", "return 0.5", "return a if b else 1.5", "return a if b else 0.25"},
        ),
        ("a.append(b)", {"pass"}),
        ("a += b", {"a -= b", "a = b"}),
        ("return [x for x in a if x]", {"return [x for x in a]"}),
        ("return f(a, b=b)", {"return f(a, )"}),
        ("raise ValueError(a + b)", set()),
        ("x: int | None", set()),
        ("return zip(a, b, strict=True)", set()),
    ],
)
def test_a_line_becomes_what_somebody_might_have_written(text: str, expected: set[str]) -> None:
    assert changes(text) == expected


def test_a_name_says_what_changes_and_not_on_which_line() -> None:
    text = "def f(a):\n    return a + 1\n"
    first, moved = File(FILE, text), File(FILE, "x = y\n\n\n" + text)
    assert {mutant.name for mutant in first.mutants} == {mutant.name for mutant in moved.mutants}
    assert {mutant.line for mutant in moved.mutants} == {5}
    assert len({mutant.name for mutant in first.mutants}) == len(first.mutants)


def test_the_same_piece_twice_in_a_function_has_two_names() -> None:
    mutants = File(FILE, "def f(a, b):\n    a()\n    b()\n    a()\n").mutants
    assert len({mutant.name for mutant in mutants}) == len(mutants) == 3


def mutant_at(area: str, number: int, column: int = 0) -> Mutant:
    path = Path(f"src/spindle_cli/{area}/x.py")
    return Mutant(f"{area}/x.py:f:term:{number}{column}", path, number, number, column, "a + b", "a")


def test_the_sample_takes_as_many_of_each_area_and_a_larger_one_begins_with_the_same() -> None:
    of_area = {area: [mutant_at(area, n) for n in range(20)] for area in ("plan", "check", "program")}
    seven, nine = sample(of_area, 7, seed=3), sample(of_area, 9, seed=3)
    assert [str(mutant.path.parent.name) for mutant in seven] == ["plan"] * 3 + ["check"] * 2 + [
        "program"
    ] * 2
    assert set(seven) < set(nine)
    assert sample({"check": of_area["check"]}, 2, seed=3) == seven[3:5]
    assert sample(of_area, 7, seed=4) != seven


def test_what_is_drawn_stays_when_code_comes_or_goes_elsewhere() -> None:
    mutants = [mutant_at("plan", n) for n in range(20)]
    first = sample({"plan": mutants}, 10, seed=3)
    moved = [replace(mutant, line=mutant.line + 5) for mutant in mutants if mutant != first[0]]
    assert [each.name for each in sample({"plan": moved}, 9, seed=3)] == [each.name for each in first[1:]]


def test_a_place_with_many_bugs_is_drawn_as_often_as_one_with_a_single_one() -> None:
    mutants = [
        mutant_at("plan", 1),
        *(mutant_at("plan", 2).__class__(f"{n}", FILE, 2, 2, 0, "", "") for n in range(9)),
    ]
    assert len(sample({"plan": mutants}, 10, seed=0)) == 2


def record(
    file: str, seconds: dict[str, float], lines: dict[str, list[int]], processes: tuple[str, ...] = ()
) -> Record:
    of_file = {str(mutant_at("plan", 0).path): lines}
    return Record(file, f"key of {file}", seconds, 0.1, frozenset(processes), frozenset(), of_file)


def test_a_bug_meets_the_quickest_tests_of_its_line_first_then_the_slow_then_those_with_processes() -> None:
    records = [
        record(
            "a", {"a1": 0.5, "a2": 0.2, "a3": 3.0, "a4": 0.1}, {"a1": [7], "a2": [7], "a3": [7], "a4": [8]}
        ),
        record("b", {"b1": 0.1, "b2": 9.0}, {"b1": [7], "b2": [7]}, processes=("b2",)),
        record("tests/plan/p", {"p1": 0.9}, {"p1": [7]}),
        record("c", {"c1": 0.1}, {"c1": [6]}),
        record("d", {"d1": 0.1}, {"": [7]}),
    ]
    trial = choose(mutant_at("plan", 7), records, budget_s=60, with_processes=True)
    quick, slow = [("tests/plan/p", ["p1"]), ("b", ["b1"]), ("a", ["a2", "a1"])], [("a", ["a3"])]
    rest = [("a", ["a4"]), ("d", ["d1"])]
    assert trial.groups == [*quick, *slow, ("b", ["b2"]), *rest]
    assert trial.left_out == 0
    without = choose(mutant_at("plan", 7), records, budget_s=60, with_processes=False)
    assert without.groups == [*quick, *slow, *rest]


def test_tests_that_take_longer_than_the_budget_are_left_out_and_counted() -> None:
    records = [record("a", {"a1": 0.5, "a2": 3.0}, {"a1": [7], "a2": [7]})]
    exactly = choose(mutant_at("plan", 7), records, budget_s=3.6, with_processes=True)
    assert exactly.groups == [("a", ["a1"]), ("a", ["a2"])]
    assert exactly.left_out == 0
    less = choose(mutant_at("plan", 7), records, budget_s=3.5, with_processes=True)
    assert less.groups == [("a", ["a1"])]
    assert less.left_out == 1


def bug_that_meets(*records: Record) -> Bug:
    mutant = mutant_at("plan", 7)
    return Bug(mutant, "text with the bug", choose(mutant, records, budget_s=60, with_processes=True))


def test_a_caught_bug_is_tried_again_when_its_catcher_changes_and_a_survivor_when_any_test_does(
    tmp_path: Path,
) -> None:
    a, b = record("a", {"a::1": 0.5}, {"a::1": [7]}), record("b", {"b::1": 0.5}, {"b::1": [7]})
    for by, changed, is_known in (("a::1", b, True), ("a::1", a, False), ("", b, False), ("", a, False)):
        results = Results(tmp_path / "results.jsonl")
        before = bug_that_meets(a, b)
        result = Result(before.mutant.name, before.key(by), bool(by), by, "", 1.0, 2, 0)
        results.add(result)
        assert before.known(results) == result
        after = bug_that_meets(*(replace(each, key="new") if each is changed else each for each in (a, b)))
        assert (after.known(results) == result) == is_known
        assert replace(before, text="another").known(results) is None


def test_a_record_is_good_until_a_file_that_it_ran_or_the_test_file_changes(tmp_path: Path) -> None:
    for name in ("tests/test_a.py", "src/ran.py", "src/loaded.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    answer = {
        "seconds": {"t": 1.0, "skipped": 0.0},
        "load_s": 0.1,
        "processes": [],
        "not_passed": ["skipped"],
        "lines": {"src/ran.py": {"": [1], "t": [2]}, "src/loaded.py": {"": [1]}},
    }
    Records(tmp_path / "records", tmp_path).write("tests/test_a.py", answer, tmp_path)

    def kept() -> Record | None:
        return Records(tmp_path / "records", tmp_path).read("tests/test_a.py")

    found = kept()
    assert found is not None and found.seconds == {"t": 1.0}
    (tmp_path / "src/loaded.py").write_text("2")
    assert kept() is not None
    for name in ("src/ran.py", "tests/test_a.py"):
        (tmp_path / name).write_text("2")
        assert kept() is None
        (tmp_path / name).write_text("1")


def test_results_are_found_by_name_and_half_a_line_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    result = Result("name", "key", True, "test", "why", 1.0, 2, 0)
    Results(path).add(result)
    with path.open("a") as file:
        file.write('{"mutant": "oth')
    known = Results(path)
    assert known.last("name") == result
    assert known.last("other") is None


def test_the_file_is_as_it_was_when_a_bug_has_been_in_it(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("whole")
    before = file.stat().st_mtime_ns
    with pytest.raises(KeyError), Tree(tmp_path).changed(Path("a.py"), "broken"):
        assert file.read_text() == "broken"
        raise KeyError
    assert (file.read_text(), file.stat().st_mtime_ns) == ("whole", before)


def test_the_excuses_are_whole_and_a_name_stands_once(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent.parent
    assert all(len(excuse.why) > 20 for excuse in read_excuses(root / PATH).values())
    path = tmp_path / "excuses.yaml"
    path.write_text("- {mutant: a, change: b, why: ''}")
    with pytest.raises(ValueError, match="an excuse has"):
        read_excuses(path)
    path.write_text("- {mutant: a, change: b, why: c}\n- {mutant: a, change: b, why: d}")
    with pytest.raises(ValueError, match="a is excused twice"):
        read_excuses(path)
