"""The machine's cluster file, with a link that is not measured here."""

from __future__ import annotations

import pytest
import yaml

from spindle_cli.profile.machine.cluster_file import machine_text
from spindle_cli.profile.types import MeasuredLink

LINK = MeasuredLink(kind="intra_node", latency_s=2e-6, points=((1e6, 5e9),))


@pytest.mark.parametrize(
    ("cores", "asked", "devices"), [(3, None, 3), (8, None, 8), (9, None, 8), (9, 12, 12)]
)
def test_a_process_for_each_core_up_to_eight_or_as_many_as_are_asked_for(
    cores: int, asked: int | None, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spindle_cli.profile.machine.cluster_file.own_cores", lambda: frozenset(range(cores)))
    monkeypatch.setattr("spindle_cli.profile.machine.cluster_file.device_of_type", lambda _: "cpu")
    monkeypatch.setattr("spindle_cli.profile.machine.cluster_file._measured", lambda _: LINK)
    written = yaml.safe_load(machine_text(asked))
    assert written["nodes"] == [
        {"count": 1, "devices": devices, "device": "cpu", "memory_gib": written["nodes"][0]["memory_gib"]}
    ]
    assert written["links"]["intra_node"] == {
        "latency_us": 2.0,
        "bandwidth_gb_per_s": 5.0,
        "curve": [[1e6, 5.0]],
    }
