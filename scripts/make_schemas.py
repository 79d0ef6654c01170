"""Write the JSON Schemas of all files and documents to schemas/, from the types that read them, and the pages
of docs/reference/: keys of the most important files, rules of `spindle check`, and options of all commands.

What a key means is in the section `Attributes:` of its type's docstring.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import ModelSchema

from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.calibrate.types import CalibrationReport
from spindle_cli.check.types import RULES, CheckReport, Violation
from spindle_cli.checkpoint.index import Checkpoint
from spindle_cli.cli.app import COMMANDS, load_command
from spindle_cli.cli.profile_summary import ProfileSummary
from spindle_cli.export.types import Exported
from spindle_cli.files.artifact import Artifact
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.request import RunRequest, WorkerError
from spindle_cli.files.run_files import PredictedVsMeasured, StepMetrics
from spindle_cli.files.runs.records import MeasuredTimeline
from spindle_cli.init.types import InitReport
from spindle_cli.launch.owner import Owner
from spindle_cli.launch.types import Launch
from spindle_cli.launch.watching.run_report import RunReport
from spindle_cli.plan.plan_report import PlanReport
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile
from spindle_cli.questions.additions import Additions
from spindle_cli.questions.compare import Comparison
from spindle_cli.questions.compare_additions import ComparedAdditions
from spindle_cli.questions.diff import Difference
from spindle_cli.questions.explain import Explanation
from spindle_cli.questions.sweep import Sweep
from spindle_cli.report.types import ReportData
from spindle_cli.show.summary import RankReport, ShowReport
from spindle_cli.simulate.simulation_report import SimulationReport
from spindle_cli.verify.types import VerifyReport
from spindle_cli.watch.types import WatchData
from spindle_cli.workload.file import WorkloadFile

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "schemas"
PAGES = ROOT / "docs" / "reference"
# Kinds of files that have a page, with its title.
DESCRIBED = {
    "workload": "Keys of the workload file",
    "cluster": "Keys of the cluster file",
    "profile": "Keys of the profile file",
    "plan": "Keys of the plan file",
    "metrics": "Keys of a line of metrics.jsonl",
    "predicted": "Keys of predicted.json",
    "checkpoint": "Keys of checkpoint.json",
}
_ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*)$")  # an attribute, or several of which the same is said
ARTIFACTS: tuple[type[Artifact], ...] = (
    WorkloadFile,
    InitReport,
    Cluster,
    ProfileSummary,
    Profile,
    Plan,
    PlanReport,
    PredictedVsMeasured,
    MeasuredTimeline,
    CalibrationReport,
    CheckReport,
    ShowReport,
    RankReport,
    Comparison,
    Sweep,
    Additions,
    ComparedAdditions,
    Difference,
    Explanation,
    SimulationReport,
    ReportData,
    Launch,
    RunRequest,
    AnalysisMemo,
    Owner,
    Checkpoint,
    Exported,
    WorkerError,
    RunReport,
    WatchData,
    VerifyReport,
)


def attributes_of(model: type[BaseModel]) -> dict[str, str]:
    """What the docstrings of a type, and of those that it is derived from, say of its attributes."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        names: list[str] = []
        for line in (
            inspect.cleandoc(each.__dict__.get("__doc__") or "").partition("Attributes:\n")[2].splitlines()
        ):
            if entry := _ENTRY.match(line):
                names = entry[1].split(", ")
                found.update(dict.fromkeys(names, entry[2]))
            elif line.strip():
                for name in names:
                    found[name] += " " + line.strip()
    return found


class _Described(GenerateJsonSchema):
    """Schemas whose keys have descriptions."""

    def model_schema(self, schema: ModelSchema) -> dict[str, Any]:
        made = super().model_schema(schema)
        said = {"schema": "Kind and version of the file.", **attributes_of(schema["cls"])}
        for name, key in made.get("properties", {}).items():
            if name in said:
                key["description"] = said[name]
        return made


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema of a file: the type's own, with the key `schema` required where it has one."""
    schema = model.model_json_schema(by_alias=True, mode="validation", schema_generator=_Described)
    if "schema" in schema["properties"]:
        schema["required"] = ["schema", *schema.get("required", [])]
    for each in (schema, *schema.get("$defs", {}).values()):
        if "description" in each:  # a docstring, whose attributes have descriptions of their own
            each["description"] = each["description"].partition("Attributes:")[0].rstrip()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "made by scripts/make_schemas.py",
        **schema,
    }


def page_of(kind: str, schema: dict[str, Any]) -> str:
    """What the keys of a file mean, for people: a section for each type in it, in the order of their use."""
    sections = [
        f"# {DESCRIBED[kind]}\n\nMade by `make schemas`, as `schemas/{kind}.json` is; rules between keys are "
        "in [contracts.md](../contracts.md).\n"
    ]
    waiting: list[tuple[str, dict[str, Any]]] = [("", schema)]
    seen: set[str] = set()
    while waiting:
        name, model = waiting.pop(0)
        if name:
            sections.append(f"## {name}\n")
        if said := model.get("description"):
            sections.append(f"{said}\n")
        keys = model.get("properties", {})
        rows = [f"| `{key}` | {_type_of(own, kind)} | {_meaning_of(own)} |" for key, own in keys.items()]
        if rows:
            sections.append("\n".join(["| key | value | meaning |", "|---|---|---|", *rows]) + "\n")
        for used in _used_by(keys):
            is_here = _PAGE_OF.get(used, kind) == kind
            if used not in seen and is_here and "properties" in schema["$defs"][used]:
                seen.add(used)
                waiting.append((used, schema["$defs"][used]))
    return "\n".join(sections)


def _used_by(said: Any) -> Iterator[str]:
    if isinstance(said, dict):
        if "$ref" in said:
            yield said["$ref"].rpartition("/")[2]
        for each in said.values():
            yield from _used_by(each)
    elif isinstance(said, list):
        for each in said:
            yield from _used_by(each)


def _meaning_of(key: dict[str, Any]) -> str:
    text = key.get("description", "").replace("|", "\\|").replace("\n", " ")
    default = None if "const" in key else key.get("default")
    return text if default in (None, "", [], {}) else f"{text} By default `{json.dumps(default)}`.".strip()


# Types that are on another page; a page's own type has no section there.
_PAGE_OF = {
    "TrainSettings": "workload",
    "LocalSgd": "workload",
    "Cluster": "cluster",
    **dict.fromkeys(
        (
            "BatchSum",
            "CurvePoint",
            "Matrix",
            "OpMemory",
            "OptimizerBytes",
            "ProcessorCosts",
            "ShareTime",
            "TiedParameters",
            "WorkloadRef",
        ),
        "profile",
    ),
}
_NAMES = {"integer": "whole number", "string": "text", "boolean": "true or false", "null": "null"}


def _type_of(said: dict[str, Any], kind: str) -> str:
    if "$ref" in said:
        name = said["$ref"].rpartition("/")[2]
        page = _PAGE_OF.get(name, kind)
        section = "" if name.lower() == page else f"#{name.lower()}"
        return f"[{name}]({'' if page == kind else f'{page}.md'}{section})"
    if "const" in said:
        return f"`{said['const']}`"
    if "enum" in said:
        return ", ".join(f"`{value}`" for value in said["enum"])
    if options := said.get("anyOf", said.get("oneOf")):
        return " or ".join(
            dict.fromkeys(_type_of(each, kind) for each in options if each.get("type") != "null")
        )
    if said.get("type") == "array":
        if items := said.get("items"):
            return f"list of {_type_of(items, kind)}"
        return (
            f"[{', '.join(_type_of(each, kind) for each in said['prefixItems'])}]"
            if "prefixItems" in said
            else "list"
        )
    if said.get("type") == "object":
        inner = said.get("additionalProperties")
        return f"by name: {_type_of(inner, kind)}" if isinstance(inner, dict) and inner else "mapping"
    return _NAMES.get(str(said.get("type")), str(said.get("type", "anything")))


def all_schemas() -> dict[str, dict[str, Any]]:
    """The schema of each file and document, by its kind."""
    models: dict[str, type[BaseModel]] = {artifact.KIND: artifact for artifact in ARTIFACTS}
    models["metrics"] = StepMetrics  # one line of metrics.jsonl
    return {kind: schema_of(model) for kind, model in models.items()}


def schema_texts() -> dict[str, str]:
    """The text of each schema, by its file name."""
    return {
        f"{kind}.json": json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
        for kind, schema in all_schemas().items()
    }


def page_texts() -> dict[str, str]:
    """The text of each page, by its file name."""
    schemas = all_schemas()
    pages = {f"{kind}.md": page_of(kind, schemas[kind]) for kind in DESCRIBED}
    return {**pages, "check.md": _rules_page(), "commands.md": _commands_page()}


def _commands_page() -> str:
    """What every option of every command does, for people, as `--help` says it."""
    sections = [
        "# Commands and their options\n\nMade by `make schemas` from what `spindle COMMAND --help` says.\n"
    ]
    for name in COMMANDS:
        command = load_command(name)
        usual = [each for each in command.params if not getattr(each, "hidden", False)]
        rows = "".join(f"| `{_called(each)}` | {_said_of(each)} |\n" for each in usual)
        table = f"| argument or option | meaning |\n|---|---|\n{rows}"
        sections.append(f"## spindle {name}\n\n{command.help.strip()}\n\n{table}")
    return "\n".join(sections)


def _called(parameter: Any) -> str:
    """An argument or option as users type it."""
    metavar = parameter.metavar or ""
    if parameter.param_type_name == "argument":
        return _in_cell(metavar or parameter.name.upper())
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return _in_cell(names if parameter.is_flag else f"{names} {metavar or 'VALUE'}")


def _said_of(parameter: Any) -> str:
    text = _in_cell(" ".join((parameter.help or "").split()))
    default = parameter.default
    has_default = isinstance(default, int | float | str) and not isinstance(default, bool)
    return f"{text} By default {default}." if has_default else text


def _in_cell(text: str) -> str:
    return text.replace("|", "\\|")


def _rules_page() -> str:
    """What `spindle check` asks of a plan, for people."""
    keys = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in attributes_of(Violation).items())
    rules = "".join(f"| `{name}` | {asked} |\n" for name, asked in RULES.items())
    return f"""# What `spindle check` asks of a plan

Made by `make schemas`. Times of slices count as equal within a millionth of what the shortest of them takes,
and those of the whole schedule within a millionth of it.

| rule | what it asks for |
|---|---|
{rules}
A violation has these keys:

| key | meaning |
|---|---|
{keys}"""


def main() -> None:
    """Write every schema, and every page."""
    PAGES.mkdir(exist_ok=True)
    for folder, texts in ((FOLDER, schema_texts()), (PAGES, page_texts())):
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
