"""What losses are multiplied by where gradients are float16, as a workload file asks for it. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from spindle_cli.files.artifact import Model, require_known_keys

# Of float32, in which the scale and its inverse are; far beyond what float16 gradients can take.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100


class LossScaleSettings(Model):
    """The scale of the losses, and how it changes: the arguments of `torch.amp.GradScaler`.

    Attributes:
        init_scale: The scale at first, from 2^-100 to 2^100.
        growth_factor: What it is multiplied by after `growth_interval` steps in a row without an overflow.
        backoff_factor: What it is multiplied by after a step in which a gradient overflows.
        growth_interval: Steps in a row without an overflow after which it grows.
        fixed: Whether it stays `init_scale`; a number instead of all this is short for it.
    """

    init_scale: float = 65536.0
    growth_factor: Annotated[float, Field(gt=1)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    growth_interval: Annotated[int, Field(ge=1, lt=2**31)] = 2000
    fixed: bool = False

    @model_validator(mode="before")
    @classmethod
    def _a_number_is_fixed(cls, data: Any) -> Any:
        if isinstance(data, int | float) and not isinstance(data, bool):
            return {"init_scale": data, "fixed": True}
        if not isinstance(data, dict | LossScaleSettings):
            raise ValueError("expected a number (the scale then never changes), or a dict of settings")
        require_known_keys(data, cls.model_fields)
        return data

    @field_validator("init_scale")
    @classmethod
    def _a_scale_and_its_inverse_are_numbers(cls, value: float) -> float:
        if not _SMALLEST <= value <= _LARGEST:
            raise ValueError("expected a number from 2^-100 to 2^100")
        return value

    @model_validator(mode="after")
    def _a_fixed_one_has_no_rules(self) -> LossScaleSettings:
        usual = LossScaleSettings.model_fields
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            if self.fixed and getattr(self, name) != usual[name].default:
                raise ValueError(f"{name}: a fixed scale never changes; leave it out, or `fixed`")
        return self
