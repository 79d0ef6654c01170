"""The moving average of the weights, as a workload file asks for it. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from spindle_cli.files.artifact import Model, require_known_keys


class Average(Model):
    """An exponential moving average of all trained parameters, beside them.

    Attributes:
        decay: Share of itself that it keeps; the rest is of the parameters as they are then. The first time
            it is the parameters themselves.
        every: It moves after every so many steps.
    """

    decay: Annotated[float, Field(gt=0, lt=1)]
    every: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        require_known_keys(data, cls.model_fields)
        return data
