"""`verify` measures rounding where it may decide, and only there; what fails then takes nothing away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from reports import report_of

from helpers.toy_plan import write_toy
from spindle_cli.errors import RunFailedError
from spindle_cli.launch.types import Launch
from spindle_cli.verify import run
from spindle_cli.verify.run import verify_plan
from spindle_cli.verify.types import Difference, VerifyOptions, VerifyReport


class Trained:
    """Stands for the runs: which were trained, and the report on each comparison."""

    def __init__(self, relative: float, fails: str = "") -> None:
        self.relative, self.fails = relative, fails
        self.runs: list[str] = []
        self.asked: list[dict[str, bool]] = []

    def train(self, launch: Launch, name: str, memo: Any = None) -> None:
        self.runs.append(launch.run_dir.name)
        if launch.run_dir.name == self.fails:
            raise RunFailedError("out of memory")

    def compare(self, _runs: object, _options: object, **asked: bool) -> VerifyReport:
        self.asked.append(asked)
        off = Difference(name="w", where="rank 0", relative=self.relative)
        is_beyond = self.relative > 1e-5 and not asked.get("with_draws")
        return report_of("gradients of step 1", (off,) if is_beyond else (), within=(off,))


@contextmanager
def instead(trained: Trained) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "train", trained.train)
        patch.setattr(run, "compare_runs", trained.compare)
        yield


@pytest.mark.parametrize(
    ("relative", "fails", "draws", "same"),
    [
        (5e-6, "", [], True),  # within the tolerance: not one run more
        (1e-4, "", ["drawn-1", "drawn-2", "drawn-3"], True),
        (1e-1, "", [], False),  # nothing that rounding could explain
        (1e-4, "drawn-2", ["drawn-1", "drawn-2"], False),
    ],
)
def test_plain_pytorch_is_trained_again_where_rounding_may_explain_what_differs(
    tmp_path: Path, relative: float, fails: str, draws: list[str], same: bool
) -> None:
    trained, said = Trained(relative, fails), list[str]()
    with instead(trained):
        report = verify_plan(write_toy(tmp_path), None, VerifyOptions(), said.append)
    assert trained.runs == ["plain", "plan", *draws]
    assert report.same == same
    assert any("out of memory" in line for line in said) == bool(fails)
