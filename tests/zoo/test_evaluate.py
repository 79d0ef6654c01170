"""Evaluation of a run of `digits`: parameters by name, figures on held-out samples, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spindle_cli.files.run_files import model_path
from spindle_cli.workload.types import Workload
from spindle_cli.zoo.digits.build import build
from spindle_cli.zoo.digits.data import load_split
from spindle_cli.zoo.digits.evaluate import main, nearest, share


def saved_run(run_dir: Path, workload: Workload, step: int = 3) -> Path:
    """A run's folder with the workload's parameters, each under the first task that has it."""
    names: dict[int, str] = {}
    tensors = {}
    for task in workload.tasks:
        for name, parameter in task.module.named_parameters():
            if id(parameter) not in names:
                names[id(parameter)] = f"{task.name}.{name}"
                tensors[names[id(parameter)]] = parameter.detach().clone()
    path = model_path(run_dir, step)
    path.parent.mkdir(parents=True)
    save_file(tensors, path)
    return run_dir


def test_an_untrained_run_answers_by_chance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    run = saved_run(tmp_path / "run", build())
    assert main(["--run", str(run), "--json"]) == 0
    shares = json.loads(capsys.readouterr().out)
    assert len(shares) == 5 and all(0 <= value < 0.3 for value in shares.values())
    assert main(["--run", str(run), "--at-least", "0.9"]) == 1
    assert "below 90.0%" in capsys.readouterr().err


def test_the_newest_parameters_of_the_run_are_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = build()
    saved_run(tmp_path / "run", workload, step=9)
    classifier = next(task.module for task in workload.tasks if task.name == "image_class").classifier
    with torch.no_grad():
        classifier.linear.weight.zero_()
        classifier.linear.bias.copy_(torch.arange(10) == 4)
    saved_run(tmp_path / "run", workload, step=10)
    main(["--run", str(tmp_path / "run"), "--json"])
    digits = load_split(True).images.digits
    always_four = (digits == 4).float().mean().item()
    assert json.loads(capsys.readouterr().out)["image_classification"] == pytest.approx(always_four)


def test_a_run_of_another_workload_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_path(tmp_path, 1)
    path.parent.mkdir(parents=True)
    save_file({"text_audio.text.norm.weight": torch.ones(3)}, path)
    assert main(["--run", str(tmp_path)]) == 3
    error = capsys.readouterr().err
    assert str(path) in error and "image_text.image.position is missing; expected (16, 64)" in error


def test_a_folder_without_parameters_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--run", str(tmp_path / "nothing")]) == 3
    assert "no checkpoints/step-*/model.safetensors" in capsys.readouterr().err


def test_retrieval_answers_with_the_digit_of_the_nearest_by_angle() -> None:
    texts = load_split(True).texts
    gallery = torch.zeros(len(texts), 2)
    gallery[0], gallery[1] = torch.tensor([5.0, 0.0]), torch.tensor([0.0, 0.1])  # names of 0 and 1
    answered = nearest(torch.tensor([[1.0, 0.1], [0.2, 0.9]]), gallery, texts)
    assert answered.tolist() == [0, 1]
    assert share(torch.zeros(len(texts)), texts) == pytest.approx(0.1)
