"""A value in a file is what it is written as: `true` would count as 1, '8' as 8, and "yes" as true."""

from __future__ import annotations

import re
from typing import Any

import pytest

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Model, validate
from spindle_cli.files.cluster import Link, NodeGroup
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import CurvePoint, LocalSgd, MetaOp, MetaOpProfile
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


POINT = {"num_devices": 1, "dp": 1, "forward_s": 1.0, "backward_s": 1.0, "source": "measured"}
PIECE = {"metaop": "a", "ops": [0, 1], "devices": [0], "dp": 1, "start_s": 0, "end_s": 1}
METAOP = {"name": "a", "task": "t", "num_ops": 1, "batch_size": 1}
NO_NUMBERS = (("8", "expected a (whole )?number"), (True, "expected a number, not true or false"))


@pytest.mark.parametrize(("value", "said"), NO_NUMBERS)
@pytest.mark.parametrize(
    ("model", "data", "key"),
    [
        (CurvePoint, POINT, "forward_s"),
        (CurvePoint, POINT, "dp"),
        (Slice, PIECE, "start_s"),
        (Slice, PIECE, "tp"),
        (MetaOp, METAOP, "num_ops"),
        (MetaOp, METAOP, "selective_share"),
        (MetaOp, METAOP, "inner_output_bytes"),
        (Link, {"latency_us": 1, "bandwidth_gb_per_s": 1}, "latency_us"),
        (TrainSettings, {}, "clip_norm"),
    ],
    ids=str,
)
def test_no_text_or_truth_is_a_number_in_any_file(
    model: type[Model], data: dict[str, Any], key: str, value: object, said: str
) -> None:
    with pytest.raises(InputError) as refused:
        validate(model, {**data, key: value}, where="f")
    assert re.fullmatch(rf"f: {key}: {said} \(found {value!r}\)", refused.value.message)


@pytest.mark.parametrize("value", ["yes", "true", 1, 0, 1.0])
@pytest.mark.parametrize(
    ("model", "data", "key"),
    [
        (Slice, PIECE, "recompute"),
        (MetaOp, METAOP, "changes_buffers"),
        (TrainSettings, {}, "shard_optimizer"),
        (LocalSgd, {"islands": 2, "every": 5, "outer": {}}, "outer.nesterov"),
    ],
)
def test_no_text_or_number_is_a_truth(
    model: type[Model], data: dict[str, Any], key: str, value: object
) -> None:
    outer, _, inner = key.rpartition(".")
    changed = {**data, outer: {inner: value}} if outer else {**data, inner: value}
    with pytest.raises(InputError) as refused:
        validate(model, changed, where="f")
    assert refused.value.message == f"f: {key}: expected true or false (found {value!r})"


def test_numbers_inside_of_lists_and_mappings_as_well() -> None:
    for key, wrong, place in (
        ("ops", [0, "1"], "ops[1]"),
        ("offload", [[0, True]], "offload[0][1]"),
        ("rows", [0, "4"], "rows[1]"),
    ):
        with pytest.raises(InputError, match=rf"f: {re.escape(place)}: expected a .*number"):
            validate(Slice, {**PIECE, key: wrong}, where="f")
    with pytest.raises(InputError, match=r"f: field_bytes\[0\]: expected a whole number"):
        validate(MetaOp, {**METAOP, "field_bytes": {0: "3"}}, where="f")
    with pytest.raises(InputError, match=r"f: field_bytes\[1\]: expected a number, not true or false"):
        validate(MetaOp, {**METAOP, "field_bytes": {True: 3}}, where="f")


def test_a_whole_number_may_have_a_point_and_a_key_be_its_text() -> None:
    """JSON has no other keys than texts."""
    assert validate(Slice, {**PIECE, "dp": 1.0, "start_s": 0}, where="f").dp == 1
    assert validate(MetaOp, {**METAOP, "field_bytes": {"0": 3}}, where="f").field_bytes == {0: 3}
    within = {**METAOP, "field_bytes": {"0": 3}, "curve": [POINT]}
    assert validate(MetaOpProfile, within, where="f").field_bytes == {0: 3}
