"""`true` in a file that people write is refused where a number belongs: it would count as 1."""

from __future__ import annotations

from typing import Any

import pytest

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import validate
from spindle_cli.files.cluster import NodeGroup
from spindle_cli.workload.file import TrainSettings

LINEAR = {"decay": "linear"}
ONE = {"a": 1.0}
# Every number of the train settings: where it is, and settings that have it.
NUMBERS: dict[str, dict[str, Any]] = {
    **{
        key: {key: True}
        for key in ("lr", "steps", "seed", "clip_norm", "accumulate", "eval_every", "warmup_steps")
    },
    **{key: {**LINEAR, key: True} for key in ("decay_steps", "min_lr", "final_fraction")},
    "ema.decay": {"ema": {"decay": True}},
    "ema.every": {"ema": {"decay": 0.5, "every": True}},
    "task_weights.a[0][0]": {"task_weights": {"a": [[True, 1.0]]}},
    "task_weights.a[0][1]": {"task_weights": {"a": [[0, True]]}},
    "sampling.draw.weights.a": {"sampling": {"draw": {"weights": {"a": True}}}},
    "sampling.draw.temperature": {"sampling": {"draw": {"weights": ONE, "temperature": True}}},
    "sampling.draw.seed": {"sampling": {"draw": {"weights": ONE, "seed": False}}},
    "sampling.every.a.every": {"sampling": {"every": {"a": {"every": True}}}},
    "sampling.every.a.offset": {"sampling": {"every": {"a": {"every": 2, "offset": False}}}},
    "groups[0].lr": {"groups": [{"name": "x", "rest": True, "lr": True}]},
    "loader.workers": {"loader": {"workers": True}},
    "loader.prefetch": {"loader": {"prefetch": True}},
    "loader.tasks.a.workers": {"loader": {"tasks": {"a": {"workers": True}}}},
    "loader.tasks.a.prefetch": {"loader": {"tasks": {"a": {"prefetch": True}}}},
}


@pytest.mark.parametrize("place", NUMBERS)
def test_a_truth_is_refused_with_its_place(place: str) -> None:
    with pytest.raises(InputError) as refused:
        validate(TrainSettings, NUMBERS[place], where="w.yaml: train")
    assert refused.value.message.startswith(f"w.yaml: train: {place}: expected a number, not true or false")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"loss_chunks": True},
            "loss_chunks: expected auto, or a whole number of chunks from 1 to 1,000,",
        ),
        ({"loss_chunks": 0}, r"loss_chunks: expected auto, .* \(found 0\)"),
        ({"loss_chunks": 1_000_001}, "loss_chunks: expected auto"),
        ({"loss_chunks": "many"}, r"loss_chunks: expected auto, .* \(found 'many'\)$"),
        (
            {"task_weights": {"a": True}},
            r"a: expected \[\[step, weight\], \.\.\.\] \(found True\)",
        ),
        ({"task_weights": {"a": 2.0}}, r"task_weights\.a: expected \[\[step, weight\], \.\.\.\]"),
        ({"groups": 3}, r"groups: expected a list \(found 3\)"),
    ],
    ids=str,
)
def test_what_was_expected_is_said_once(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        validate(TrainSettings, settings, where="w.yaml")
    assert refused.value.message.count("\n") == 0


def test_chunks_may_be_a_million() -> None:
    assert validate(TrainSettings, {"loss_chunks": 1_000_000}, where="").loss_chunks == 1_000_000


@pytest.mark.parametrize("key", ["count", "devices", "memory_gib", "nics", "reserve_gib"])
def test_a_clusters_numbers_as_well(key: str) -> None:
    with pytest.raises(InputError, match=f"c.yaml: {key}: expected a number"):
        validate(NodeGroup, {"devices": 2, "device": "cpu", "memory_gib": 4, key: True}, where="c.yaml")
