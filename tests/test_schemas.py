"""The published JSON Schemas: current, and true of the files in the repository and of what we write."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

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


def test_schemas_are_current() -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "schemas").glob("*.json")}
    assert kept == make_schemas().schema_texts(), "run `make schemas`"


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
