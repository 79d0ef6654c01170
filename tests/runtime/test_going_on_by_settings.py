"""Optimizer groups and learning rates of one worker, in this process, go on as they were, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from alone import STEPS, run, world_of_one
from safetensors.torch import load_file

from helpers.checkpoints import write_index
from spindle_cli.checkpoint.files import checkpoint_folder
from spindle_cli.checkpoint.index import read_index
from spindle_cli.errors import InputError


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


GROUPED = {
    "optimizer": "NAdam",
    "lr": 0.02,
    "clip_norm": 1.0,
    "groups": [
        {"name": "biases", "kinds": ["biases"], "optimizer": "own_optimizer:Counting"},
        {"name": "weights", "rest": True, "lr": 0.01},
    ],
    "schedule": {"name": "ExponentialLR", "gamma": 0.9},
}


def test_every_optimizer_group_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run(tmp_path / "whole", train=GROUPED)
    run(tmp_path / "parts", steps=3, train=GROUPED)
    run(tmp_path / "parts", resume=True)
    expected, found = (
        load_file(checkpoint_folder(tmp_path / name, STEPS) / "rank-00000.safetensors")
        for name in ("whole", "parts")
    )
    assert {key for key in expected if not torch.equal(expected[key], found[key])} == set()
    keys = {key.rsplit(".", 1)[1] for key in expected if key.startswith("optimizer")}
    assert {"seen", "sum", "mu_product", "exp_avg"} <= keys
    index = read_index(checkpoint_folder(tmp_path / "parts", STEPS))
    assert {name: saved.hyperparameters["lr"] for name, saved in index.groups.items()} == {
        name: saved.hyperparameters["lr"]
        for name, saved in read_index(checkpoint_folder(tmp_path / "whole", STEPS)).groups.items()
    }
    assert all(name.endswith("bias") for name in index.groups["biases"].parameters)


def test_a_decay_to_the_runs_end_does_not_move_with_it(tmp_path: Path) -> None:
    """Two of six steps; a run of eight would decay otherwise, unless it says where to."""
    train = {"optimizer": "SGD", "lr": 0.1, "warmup_steps": 1, "decay": "linear", "steps": 6}
    folder = tmp_path / "run"
    run(folder, steps=2, train=train)
    source = folder / "workload.yaml"
    source.write_text(source.read_text().replace("steps: 6", "steps: 8"))
    with pytest.raises(
        InputError, match=r"to decay until step 6, and now is to until 8\n  Say `decay_steps: 6`"
    ):
        run(folder, resume=True)
    source.write_text(source.read_text().replace("steps: 8", "steps: 8\n  decay_steps: 6"))
    run(folder, steps=4, resume=True)
    index = read_index(checkpoint_folder(folder, 4))
    assert index.hyperparameters["lr"] == pytest.approx(0.1 * 2 / 5)  # of update 4: 6 is the end, 1 the top


def test_a_parameter_that_would_change_its_group_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", steps=2, train=GROUPED)
    folder = checkpoint_folder(tmp_path / "run", 2)
    index = read_index(folder)
    first, *others = index.groups["biases"].parameters
    groups = {
        "biases": index.groups["biases"].model_copy(update={"parameters": tuple(others)}),
        "weights": index.groups["weights"].model_copy(
            update={"parameters": (first, *index.groups["weights"].parameters)}
        ),
    }
    write_index(folder, index.model_copy(update={"groups": groups}))
    with pytest.raises(InputError, match=f"{first} was trained in optimizer group 'weights', and is in 'bia"):
        run(tmp_path / "run", resume=True)


def test_another_optimizer_for_some_parameters_cannot_take_over_their_state(tmp_path: Path) -> None:
    run(tmp_path / "run", steps=2, train=GROUPED)
    groups = [{"name": "biases", "kinds": ["biases"], "optimizer": "SGD"}, GROUPED["groups"][1]]
    with pytest.raises(
        InputError, match=r"biases: optimizer = 'own_optimizer:Counting' for .*bias, but .*SGD"
    ):
        run(tmp_path / "other", train={**GROUPED, "groups": groups}, begin_from=tmp_path / "run")
