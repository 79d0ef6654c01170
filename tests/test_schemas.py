"""The published JSON Schemas: current, and true of the files in the repository and of what we write."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import jsonschema
import pydantic
import pytest
import yaml
from pydantic import BaseModel

from helpers.plans import two_towers
from spindle_cli.files.artifact import to_json
from spindle_cli.plan.file import plan_text

ROOT = Path(__file__).parent.parent
REFERENCE = re.compile(r"^# yaml-language-server: \$schema=(\S+)$")
KEPT_FILES = sorted([*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("examples/**/*.yaml")])


def make_schemas() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("make_schemas", ROOT / "scripts" / "make_schemas.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def schema(kind: str) -> Any:
    return json.loads((ROOT / "schemas" / f"{kind}.json").read_text(encoding="utf-8"))


# Other versions of pydantic say the same in other words.
PINNED = re.search(r"^pydantic==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
with_the_pinned_pydantic = pytest.mark.skipif(
    PINNED is None or PINNED[1] != pydantic.VERSION,
    reason="files are made with the pydantic of constraints.txt",
)


@with_the_pinned_pydantic
def test_schemas_are_current() -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "schemas").glob("*.json")}
    assert kept == make_schemas().schema_texts(), "run `make schemas`"


@with_the_pinned_pydantic
def test_pages_of_keys_are_current() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    kept = {path.name: path.read_text(encoding="utf-8") for path in pages}
    for elsewhere in ("faults.md", "pairs.md"):  # made by `make reliability` and `make test-pairs`
        del kept[elsewhere]
    assert kept == make_schemas().page_texts(), "run `make schemas`"


@pytest.mark.parametrize(
    "page",
    sorted(set((ROOT / "docs" / "reference").glob("*.md")) - {ROOT / "docs" / "reference" / "pairs.md"}),
    ids=lambda path: path.name,
)
def test_every_key_of_a_page_has_a_meaning(page: Path) -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|(?:.* \|)? (.*) \|$", page.read_text(encoding="utf-8"), re.M)
    assert rows
    assert [key for key, meaning in rows if not meaning.strip()] == []


def test_every_key_of_a_schema_has_a_meaning() -> None:
    bare = [
        f"{kind}: {name}.{key}"
        for kind, made in make_schemas().all_schemas().items()
        for name, model in {kind: made, **made.get("$defs", {})}.items()
        for key, said in model.get("properties", {}).items()
        if not said.get("description")
    ]
    assert not bare


def test_docstrings_describe_keys_that_there_are() -> None:
    script = make_schemas()
    for model in _models_of(script.ARTIFACTS):
        assert script.attributes_of(model).keys() <= model.model_fields.keys(), model


def _models_of(artifacts: tuple[type[BaseModel], ...]) -> set[type[BaseModel]]:
    """The types of files, and all that these have inside."""
    found, waiting = set(), list(artifacts)
    while waiting:
        annotation = waiting.pop()
        waiting += get_args(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in found:
            found.add(annotation)
            waiting += [field.annotation for field in annotation.model_fields.values()]
    return found


def test_what_a_docstring_says_of_a_key_is_its_description() -> None:
    class Base(BaseModel):
        """A base.

        Attributes:
            first: What it is: one thing.
        """

        first: int

    class Derived(Base):
        """Derived, in
        two lines.

        Attributes:
            second: What goes
                on in another line.
        """

        second: int
        third: int = 3

    made = make_schemas().schema_of(Derived)
    assert made["description"] == "Derived, in\ntwo lines."
    assert {key: own.get("description") for key, own in made["properties"].items()} == {
        "first": "What it is: one thing.",
        "second": "What goes on in another line.",
        "third": None,
    }


@pytest.mark.parametrize("path", sorted((ROOT / "schemas").glob("*.json")), ids=lambda path: path.name)
def test_schemas_are_valid_schemas(path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text(encoding="utf-8")))


def test_a_written_plan_and_profile_satisfy_their_schemas() -> None:
    profile, plan = two_towers()
    jsonschema.validate(yaml.safe_load(plan_text(plan)), schema("plan"))
    jsonschema.validate(json.loads(to_json(profile)), schema("profile"))


@pytest.mark.parametrize("kind", ["workload", "cluster", "profile", "plan"])
def test_a_schema_refuses_another_version(kind: str) -> None:
    errors = jsonschema.Draft202012Validator(schema(kind)).iter_errors({"schema": f"spindle.{kind}/9"})
    assert any(list(error.path) == ["schema"] for error in errors)


@pytest.mark.parametrize("path", KEPT_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kept_files_name_their_schema_and_satisfy_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    match = REFERENCE.match(text.splitlines()[0])
    assert match, "the first line should be '# yaml-language-server: $schema=<path of schemas/...>'"
    referenced = (path.parent / match[1]).resolve()
    assert referenced.parent == ROOT / "schemas"
    jsonschema.validate(yaml.safe_load(text), json.loads(referenced.read_text(encoding="utf-8")))
