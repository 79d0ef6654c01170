"""Going on after an interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from spindle_cli.errors import InputError
from spindle_cli.profile.measuring.partial import ResumeFile
from spindle_cli.profile.types import OpTiming, PhaseTimes, RuntimeOverhead

TIMING = OpTiming(
    slowest=(PhaseTimes(forward_s=1.0, backward_s=2.0, spread=0.1, repeats=5),), activation_bytes=7
)


def test_results_are_found_again_under_the_same_conditions_only(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    first = ResumeFile(out, "sha256:a")
    first.add_timing("layer/8", TIMING)
    first.add_failed("layer/64")
    first.add_overhead(RuntimeOverhead(step_s=2.0, pass_s=1.0))
    again = ResumeFile(out, "sha256:a")
    assert again.timings == {"layer/8": TIMING} and again.failed == {"layer/64"} and again.resumed == 1
    assert again.overhead == RuntimeOverhead(step_s=2.0, pass_s=1.0)
    other = ResumeFile(out, "sha256:b")
    assert other.overhead is None
    assert other.timings == {} and other.resumed == 0


def test_nothing_is_left_when_the_profile_is_complete(tmp_path: Path) -> None:
    kept = ResumeFile(tmp_path / "profile.json", "sha256:a")
    kept.add_timing("layer/8", TIMING)
    assert [path.name for path in tmp_path.iterdir()] == ["profile.partial.json"]
    kept.remove()
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_rest_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "profile.partial.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"profile\.partial\.json") as refused:
        ResumeFile(tmp_path / "profile.json", "sha256:a")
    assert refused.value.hint is not None and "Remove" in refused.value.hint


def test_a_full_disk_or_missing_folder_is_said(tmp_path: Path) -> None:
    kept = ResumeFile(tmp_path / "gone" / "profile.json", "sha256:a")
    with pytest.raises(InputError, match="cannot be written"):
        kept.add_timing("layer/8", TIMING)
