"""What transformers computes of the grids of images, as calls that every share makes for its own samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'spindle-cli[hf]')")

from hf_families import FAMILIES
from hf_models.multimodal import PICTURE
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from spindle_cli.analysis.tracing.proxies.grids import RopeIndex
from spindle_cli.errors import WorkloadError

SAMPLES, LENGTH, SHOWN = 3, 10, 4


@pytest.fixture(scope="module")
def model() -> Qwen2VLModel:
    return FAMILIES["qwen2_vl"]().module.model


def fields(at: list[list[int]], grids: list[list[int]], padded: bool = True) -> dict[str, Tensor]:
    """Words with images of four tokens from the places `at` on, of each sample."""
    tokens = torch.arange(SAMPLES * LENGTH).reshape(SAMPLES, LENGTH) % 30 + 3
    for sample, places in enumerate(at):
        for place in places:
            tokens[sample, place : place + SHOWN] = PICTURE
    mask = torch.arange(LENGTH) < torch.tensor([[10], [9], [10]])
    return {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == PICTURE).int(),
        "image_grid_thw": torch.tensor(grids),
        **({"attention_mask": mask.long()} if padded else {}),
    }


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(
    ("at", "grids"),
    [
        ([[0], [2], [5]], [[1, 4, 4]] * 3),
        ([[0], [2], [5]], [[1, 4, 4], [1, 2, 8], [1, 8, 2]]),
        ([[0, 5], [0, 5], [1, 6]], [[1, 4, 4], [1, 2, 8]] * 3),
    ],
)
def test_positions_are_the_models_own(
    model: Qwen2VLModel, at: list[list[int]], grids: list[list[int]], padded: bool
) -> None:
    given = fields(at, grids, padded)
    made = RopeIndex(model, Qwen2VLModel.get_rope_index)(**given)
    for own, expected in zip(made, model.get_rope_index(**given), strict=True):
        assert torch.equal(own, expected)


def test_they_have_the_shapes_of_what_has_no_values(model: Qwen2VLModel) -> None:
    given = fields([[0], [2], [5]], [[1, 4, 4]] * 3)
    call = RopeIndex(model, Qwen2VLModel.get_rope_index)
    without = call(**{name: value.to("meta") for name, value in given.items()})
    for one, other in zip(without, call(**given), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("at", [[[0], [], [0, 5]], [[0], [0, 5], [0]]])
def test_a_sample_with_more_or_fewer_images_than_grids_is_refused(
    model: Qwen2VLModel, at: list[list[int]]
) -> None:
    given = fields(at, [[1, 4, 4]] * 3)
    with pytest.raises(WorkloadError, match="'image_grid_thw' has 1 rows of a sample"):
        RopeIndex(model, Qwen2VLModel.get_rope_index)(**given)


def test_grids_that_are_not_as_many_for_every_sample_are_refused(model: Qwen2VLModel) -> None:
    given = fields([[0], [2], [0, 5]], [[1, 4, 4]] * 4)
    with pytest.raises(WorkloadError, match="4 rows of grids for 3 samples"):
        RopeIndex(model, Qwen2VLModel.get_rope_index)(**given)


def test_models_of_other_settings_are_told_apart(model: Qwen2VLModel) -> None:
    call = RopeIndex(model, Qwen2VLModel.get_rope_index)
    before = repr(call)
    model.config.vision_config.spatial_merge_size = 1
    try:
        assert repr(RopeIndex(model, Qwen2VLModel.get_rope_index)) != before
    finally:
        model.config.vision_config.spatial_merge_size = 2
