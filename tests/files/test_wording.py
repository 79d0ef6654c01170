"""What is wrong in a file is said in words about the file, whatever reads it."""

from __future__ import annotations

from typing import Any

import pytest

from spindle_cli.errors import InputError
from spindle_cli.workload.file import WorkloadFile

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an empty list": ({"groups": []}, "train.groups: expected 1 or more entries (found [])"),
    "an empty list inside": (
        {"groups": [{"name": "a", "kinds": ["norms"], "excluding": []}]},
        "train.groups[0].excluding: expected 1 or more entries (found [])",
    ),
    "an empty mapping": (
        {"sampling": {"draw": {"weights": {}}}},
        "train.sampling.draw.weights: expected 1 or more entries (found {})",
    ),
    "no whole number": ({"accumulate": "x"}, "train.accumulate: expected a whole number (found 'x')"),
    "a broken number": ({"seed": 1.5}, "train.seed: expected a whole number (found 1.5)"),
    "no number": ({"lr": []}, "train.lr: expected a number (found [])"),
    "too small": ({"steps": 0}, "train.steps: expected a number greater than or equal to 1 (found 0)"),
    "too large": ({"ema": {"decay": 2}}, "train.ema.decay: expected a number less than 1 (found 2)"),
    "no text": ({"optimizer": 3}, "train.optimizer: expected a text (found 3)"),
    "neither true nor false": (
        {"shard_optimizer": "x"},
        "train.shard_optimizer: expected true or false (found 'x')",
    ),
    "a large mapping": (
        {"optimizer": {"name": "a" * 70, "of": "b" * 70}},
        "train.optimizer: expected a text (found a mapping of 2 keys)",
    ),
    "a large list": ({"optimizer": ["a" * 30] * 4}, "train.optimizer: expected a text (found a list of 4)"),
    "none of these": ({"reduce": "x"}, "train.reduce: expected 'float32' or 'parameters' (found 'x')"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_is_told_what_it_is_expected_to_be(name: str) -> None:
    train, said = WRONG[name]
    with pytest.raises(InputError) as caught:
        WorkloadFile.from_data(
            {"schema": "spindle.workload/1", "model": "a:b", "train": train}, where="w.yaml"
        )
    assert str(caught.value) == f"w.yaml: {said}"
