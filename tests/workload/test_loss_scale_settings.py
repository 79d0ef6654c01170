"""The loss scale in a workload file: torch's names and defaults, or a number that stays."""

from __future__ import annotations

import inspect

import pytest
from pydantic import ValidationError
from torch.amp import GradScaler

from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.updates import LossScaleSettings

FP16 = {"precision": "fp16-autocast"}


def test_names_and_defaults_are_those_of_torchs_grad_scaler() -> None:
    known = inspect.signature(GradScaler.__init__).parameters
    usual = {name: field.default for name, field in LossScaleSettings.model_fields.items() if name != "fixed"}
    assert usual == {name: known[name].default for name in usual}
    assert len(usual) == 4


def test_float16_is_scaled_by_default_and_nothing_else_is() -> None:
    assert TrainSettings.model_validate(FP16).scaling == LossScaleSettings()
    assert TrainSettings.model_validate(FP16).autocast == "float16"
    for precision, autocast in (("full", None), ("bf16", None), ("bf16-autocast", "bfloat16")):
        train = TrainSettings.model_validate({"precision": precision})
        assert (train.scaling, train.autocast) == (None, autocast)


def test_a_number_stays() -> None:
    scaling = TrainSettings.model_validate({**FP16, "loss_scale": 1024}).scaling
    assert scaling == LossScaleSettings(init_scale=1024.0, fixed=True)
    said = TrainSettings.model_validate({**FP16, "loss_scale": {"init_scale": 8, "backoff_factor": 0.25}})
    assert said.scaling == LossScaleSettings(init_scale=8.0, backoff_factor=0.25)
    assert TrainSettings.model_validate(said.model_dump()) == said  # as a checkpoint keeps it


def test_in_the_dtype_that_is_asked_for_nothing_is_scaled() -> None:
    train = TrainSettings.model_validate({**FP16, "loss_scale": 8}).in_full_precision()
    assert (train.precision, train.scaling) == ("full", None)
    assert TrainSettings.model_validate(train.model_dump()) == train


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss_scale": 8}, "loss_scale: goes with precision: fp16-autocast"),
        ({"precision": "bf16-autocast", "loss_scale": {}}, "loss_scale: goes with precision: fp16-autocast"),
        ({**FP16, "loss_scale": 0}, "expected a number from"),
        ({**FP16, "loss_scale": 2.0**101}, "expected a number from"),
        ({**FP16, "loss_scale": 2.0**-101}, "expected a number from"),
        ({**FP16, "loss_scale": True}, "expected a number"),
        ({**FP16, "loss_scale": "auto"}, "expected a number"),
        ({**FP16, "loss_scale": {"growth_factor": 1}}, "greater than 1"),
        ({**FP16, "loss_scale": {"backoff_factor": 1}}, "less than 1"),
        ({**FP16, "loss_scale": {"backoff_factor": 0}}, "greater than 0"),
        ({**FP16, "loss_scale": {"growth_interval": 0}}, "greater than or equal to 1"),
        ({**FP16, "loss_scale": {"init_scal": 8}}, "init_scal"),
        ({**FP16, "loss_scale": {"fixed": True, "growth_interval": 5}}, "a fixed scale never changes"),
        ({"precision": "fp16"}, "fp16-autocast"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainSettings.model_validate(settings)
