"""Workloads that draw: their data is the same in both runs, and `--no-randomness` makes the rest so."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from helpers.toy_plan import write_toy
from spindle_cli.errors import RunFailedError
from spindle_cli.verify.run import verify_plan
from spindle_cli.verify.show import render_report
from spindle_cli.verify.types import VerifyOptions

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ready_pythons")]


def test_dropout_noise_and_random_samples_are_the_same_without_chance(tmp_path: Path) -> None:
    plan = write_toy(tmp_path, module="drawing_workload.py")
    options = VerifyOptions(steps=2, dtype="float64", no_randomness=True)
    report = verify_plan(plan, None, options, lambda line: None)
    assert report.same, report
    assert report.no_randomness
    console = Console(record=True, width=200)
    console.print(render_report(report))
    first = console.export_text().splitlines()[0]
    assert first.startswith("same model: ") and first.rstrip().endswith("both without randomness")


def test_with_chance_it_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    plan = write_toy(tmp_path, module="drawing_workload.py")
    with pytest.raises(RunFailedError, match="draws random numbers while it trains") as caught:
        verify_plan(plan, None, VerifyOptions(steps=1), lambda line: None)
    assert caught.value.hint is not None and "--no-randomness" in caught.value.hint
