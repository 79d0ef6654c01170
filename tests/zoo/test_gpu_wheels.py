"""What is carried to a GPU machine without network: pinned wheels, and how they are laid out there."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import gpu_wheels
import pytest


class Pip:
    """Stands for pip, which has wheels of these requirements alone."""

    def __init__(self, *there: str) -> None:
        self.there, self.asked = there, list[str]()

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        wanted, folder = command[-1], Path(command[command.index("--dest") + 1])
        self.asked.append(wanted)
        if wanted not in self.there:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution\n")
        folder.mkdir(exist_ok=True)
        (folder / f"{wanted}.whl").touch()
        return subprocess.CompletedProcess(command, 0, "", "")


def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pip: Pip, *also: str) -> int:
    monkeypatch.setattr(gpu_wheels, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_wheels, "MISSING", ("PuLP", "typing_extensions"))
    monkeypatch.setattr(subprocess, "run", pip)
    (tmp_path / "constraints.txt").write_text("# ours\npulp==3.3.2\ntyping-extensions==4.16.0\n")
    return gpu_wheels.main([str(tmp_path / "wheels"), *(("--also", *also) if also else ())])


def test_wheels_are_of_the_pinned_versions_or_of_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = Pip("PuLP==3.3.2", "typing_extensions", "rich==1")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "old-1.whl").touch()
    assert fetched(monkeypatch, tmp_path, pip, "rich==1") == 0
    assert pip.asked == ["PuLP==3.3.2", "typing_extensions==4.16.0", "typing_extensions", "rich==1"]
    assert not (tmp_path / "wheels" / "old-1.whl").exists()


def test_a_wheel_that_is_nowhere_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetched(monkeypatch, tmp_path, Pip("PuLP==3.3.2")) == 1
    assert "there is no wheel of typing_extensions==4.16.0 for Python 3.12" in capsys.readouterr().out


def test_modules_are_laid_into_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "other"):
        with zipfile.ZipFile(tmp_path / f"{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
            wheel.writestr(f"{name}-1.data/scripts/{name}", "")
    site = tmp_path / "site"
    assert gpu_wheels.main([str(tmp_path), "--unpack", str(site)]) == 0
    assert {path.name for path in site.iterdir()} == {"one", "other"}
    assert gpu_wheels.main([str(tmp_path / "nowhere"), "--unpack", str(site)]) == 1
    assert "there are no wheels" in capsys.readouterr().out
