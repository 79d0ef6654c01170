"""Write the JSON Schemas of all files and documents to schemas/, from the types that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from spindle_cli.calibrate.types import CalibrationReport
from spindle_cli.check.check_report import CheckReport
from spindle_cli.checkpoint.index import Checkpoint
from spindle_cli.cli.profile_summary import ProfileSummary
from spindle_cli.export.types import Exported
from spindle_cli.files.artifact import Artifact
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.request import RunRequest, WorkerError
from spindle_cli.files.run_files import PredictedVsMeasured, StepMetrics
from spindle_cli.files.runs.timeline import MeasuredTimeline
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
from spindle_cli.show.program import RankReport
from spindle_cli.show.summary import ShowReport
from spindle_cli.simulate.simulation_report import SimulationReport
from spindle_cli.verify.types import VerifyReport
from spindle_cli.watch.types import WatchData
from spindle_cli.workload.file import WorkloadFile
from spindle_cli.workload.memo import AnalysisMemo

FOLDER = Path(__file__).parent.parent / "schemas"
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


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON Schema of a file: the type's own, with the key `schema` required where it has one."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    if "schema" in schema["properties"]:
        schema["required"] = ["schema", *schema.get("required", [])]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": "made by scripts/make_schemas.py",
        **schema,
    }


def schema_texts() -> dict[str, str]:
    """The text of each schema, by its file name."""
    models: dict[str, type[BaseModel]] = {artifact.KIND: artifact for artifact in ARTIFACTS}
    models["metrics"] = StepMetrics  # one line of metrics.jsonl
    return {
        f"{kind}.json": json.dumps(schema_of(model), indent=1, ensure_ascii=False) + "\n"
        for kind, model in models.items()
    }


def main() -> None:
    """Write every schema."""
    for name, text in schema_texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
