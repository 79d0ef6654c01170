"""Parameters that are shared out and kept from a slice's forward pass to its backward pass: in plan files,
and what that takes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from test_sharding import KEPT, PARAMETERS, net_of, require_sound, shared

from helpers.plans import cluster_of, curve_of
from spindle_cli.errors import InputError, UsageError
from spindle_cli.plan.best.request import parse_levels
from spindle_cli.plan.file import plan_text, write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.units import MIB


def test_a_file_says_what_is_kept_beside_the_level(tmp_path: Path) -> None:
    """So that who knows the four levels alone can read it."""
    path = tmp_path / "plan.yaml"
    plan = make_plan(shared(net_of()), cluster_of(2, memory_gib=16), effort=0, sharding={"t/net": KEPT})
    require_sound(plan, shared(net_of()))
    assert plan.sharding == {"t/net": KEPT}
    write_plan(path, plan)
    data = yaml.safe_load(path.read_text())
    assert data["sharding"] == {"t/net": "parameters"}
    assert data["sharding_kept"] == ["t/net"]
    read = Plan.read(path)
    assert read.sharding == {"t/net": KEPT}
    assert plan_text(read) == plan_text(plan)
    del data["sharding_kept"]
    path.write_text(yaml.safe_dump(data))
    assert Plan.read(path).sharding == {"t/net": PARAMETERS}
    assert "sharding_kept" not in plan_text(Plan.read(path))


@pytest.mark.parametrize(
    ("levels", "kept", "message"),
    [
        ({"t/net": "gradients"}, ["t/net"], "sharding_kept: 't/net': expected a key for which sharding says"),
        ({}, ["t/net"], "sharding_kept: 't/net': expected a key"),
        ({"t/net": "parameters"}, ["t/other"], "sharding_kept: 't/other': expected a key"),
        ({"t/net": "parameters-kept"}, [], "'gradients' or 'parameters' (found 'parameters-kept')"),
        ({"t/net": "parameters"}, "t/net", "sharding_kept"),
        ({"t/net": "parameters"}, [3], "sharding_kept"),
        ({"t/net": "parameters"}, {"t/net": True}, "sharding_kept"),
        (["t/net"], ["t/net"], "sharding"),
        ({"t/net": ["parameters"]}, ["t/net"], "sharding"),
    ],
)
def test_what_a_file_cannot_keep_is_refused(
    levels: object, kept: object, message: str, tmp_path: Path
) -> None:
    plan = make_plan(shared(net_of()), cluster_of(2, memory_gib=16), effort=0, sharding={"t/net": KEPT})
    data = {**yaml.safe_load(plan_text(plan)), "sharding": levels, "sharding_kept": kept}
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(InputError) as caught:
        Plan.read(path)
    assert message in str(caught.value)


def test_the_level_is_asked_for_by_its_name() -> None:
    assert parse_levels(["t/net=parameters-kept"]) == {"t/net": KEPT}
    with pytest.raises(UsageError, match="gradients, parameters-kept, parameters"):
        parse_levels(["t/net=kept"])


def test_what_is_kept_takes_fewer_gathers_and_more_memory() -> None:
    """Of ops too short to hide anything: ten gathers in place of twenty; 1,000 MiB in place of 200."""
    net = net_of().model_copy(update={"curve": curve_of({2: 0.003})})
    cluster = cluster_of(2, memory_gib=16)
    plans = {
        level: make_plan(shared(net), cluster, effort=0, sharding={"t/net": level})
        for level in (KEPT, PARAMETERS)
    }
    once_s = 10e-6 + 50 * MIB / 5e9
    saved_s = plans[PARAMETERS].predicted.transfer_s - plans[KEPT].predicted.transfer_s
    assert 9 * once_s <= saved_s <= 10 * once_s + 1e-9
    peaks = {level: max(plan.predicted.peak_memory_bytes) for level, plan in plans.items()}
    assert peaks[KEPT] - peaks[PARAMETERS] == pytest.approx(1.01 * 800 * MIB, rel=0.2)
