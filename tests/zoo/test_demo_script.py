"""What scripts/demo.py does besides calling commands: it chooses its folder, and stops at a failure."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("spindle_demo_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_first_free_numbered_folder_is_taken(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [demo.choose_out(None) for _ in range(2)] == [Path("runs/demo-1"), Path("runs/demo-2")]
    assert demo.choose_out(tmp_path / "mine") == tmp_path / "mine"


def test_a_failing_command_ends_the_demo_with_its_exit_code(
    demo: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.spindle("Check", "check", tmp_path / "none.yaml")
    assert ended.value.code == 3
    output = capfd.readouterr()
    assert "$ spindle check" in output.out and "failed with exit code 3" in output.err


def test_the_workload_and_the_cluster_are_there(demo: ModuleType) -> None:
    assert demo.WORKLOAD.is_file() and demo.CLUSTER.is_file()
