"""Reading files: any bytes give a value or one error that names the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spindle_cli.analysis.memo import AnalysisMemo
from spindle_cli.checkpoint.index import Checkpoint
from spindle_cli.errors import InputError
from spindle_cli.files import artifact
from spindle_cli.files.artifact import Artifact, read_data
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.request import RunRequest, WorkerError
from spindle_cli.files.run_files import PredictedVsMeasured
from spindle_cli.files.runs.records import MeasuredTimeline
from spindle_cli.launch.owner import Owner
from spindle_cli.launch.types import WorkerExits
from spindle_cli.plan.types import Plan, parse_devices
from spindle_cli.profile.measuring.partial import PartialProfile
from spindle_cli.profile.types import Profile
from spindle_cli.workload.file import WorkloadFile

KINDS: tuple[type[Artifact], ...] = (
    *(Cluster, Plan, Profile, Checkpoint, RunRequest, WorkerError, WorkerExits, Owner),
    *(PredictedVsMeasured, MeasuredTimeline, PartialProfile, AnalysisMemo, WorkloadFile),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.sampled_from([".json", ".yaml"]))
def test_any_bytes_are_a_value_or_an_input_error(tmp_path: Path, content: bytes, ending: str) -> None:
    path = tmp_path / f"file{ending}"
    path.write_bytes(content)
    for kind in KINDS:
        with pytest.raises(InputError, match=r"file\.(json|yaml)"):
            kind.read(path)


def test_a_file_is_read_up_to_its_limit_and_not_beyond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact, "MAX_BYTES", 2**20)
    path = tmp_path / "x.json"
    path.write_text(json.dumps("a" * (2**20 - 2)))
    assert len(read_data(path)) == 2**20 - 2
    path.write_text(json.dumps("a" * (2**20 - 1)))
    with pytest.raises(InputError, match=r"x\.json: larger than 1 MiB"):
        read_data(path)


def test_what_has_no_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "MAX_BYTES", 2**20)
    with pytest.raises(InputError, match="/dev/zero: larger than 1 MiB"):
        read_data(Path("/dev/zero"))


def test_ranges_of_devices_stand_for_no_more_than_there_may_be() -> None:
    assert parse_devices(["0-65535"]) == tuple(range(2**16))
    with pytest.raises(ValueError, match="more than 65536 devices"):
        parse_devices(["0-65534"] * 1000)


def test_a_message_is_short_however_large_the_value(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"schema": ["spindle"] * 10**5}))
    with pytest.raises(InputError) as caught:
        Plan.read(path)
    assert len(str(caught.value)) < 500
