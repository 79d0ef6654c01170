"""The example of fine-tuning, as a user walks through it: from a checkpoint of Hugging Face's to another."""

from __future__ import annotations

import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.cli import run_spindle

# Whoever collects tests would import them for 3 s.
MISSING = [name for name in ("transformers", "peft") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}"),
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.usefixtures("ready_pythons"),
]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "hf_finetune"
QUICK = ("--nproc", 1, "--threads", 1, "--time-limit", 0.02, "--no-check", "--accept-noise")


def script(name: str, *arguments: object) -> int:
    """One of the example's scripts; how it ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            runpy.run_path(str(EXAMPLE / name), run_name="__main__")
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


def spindle(*arguments: object) -> str:
    """A command that ends well; what it says."""
    ended = run_spindle(*arguments)
    assert ended.code == 0, ended.err
    return ended.err


def test_from_profile_to_from_pretrained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("workload.py", "toy.yaml"):
        shutil.copy(EXAMPLE / name, tmp_path)
    assert script("make_base.py", "base") == 0
    cluster = ROOT / "configs" / "clusters" / "cpu-2.yaml"
    said = spindle("profile", "toy.yaml", "--cluster", cluster, "--tp", 2, *QUICK, "-o", "profile.json")
    assert (
        "LlamaDecoderLayer has adapters on self_attn.q_proj, self_attn.v_proj, and what they adapt is not "
        "split" in said
    )
    spindle("plan", "profile.json", "--cluster", cluster, "-o", "plan.yaml")
    spindle("launch", "plan.yaml", "--steps", 2, "--checkpoint-every", 1, "--run-dir", "run")
    spindle("export", "run", "--task", "chat", "--peft", "adapters", "-o", "adapters")
    spindle("export", "run", "--task", "chat", "--peft", "merged", "--shard-size", "40KB", "-o", "merged")
    spindle("export", "run", "--task", "topic", "--shard-size", "5GB", "-o", "topic")
    spindle("export", "run", "-o", "model.safetensors")
    capsys.readouterr()
    assert script("check.py", tmp_path) == 0
    assert "merged: logits off by at most" in capsys.readouterr().out
