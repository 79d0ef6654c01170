"""What the optimizer keeps of some of the parameters, as a profile and a plan say it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spindle_cli.files.artifact import Model


class OptimizerBytes(Model):
    """What the optimizer keeps of some trained parameters whose settings differ from others', and who steps
    them. All for each byte of them.

    Attributes:
        state_per_param: of state that devices with the same parameters share, where they share any.
        whole_state_per_param: of state that each of them keeps whole.
        whole_share: of the parameters, those that each of them steps whole.
    """

    state_per_param: Annotated[float, Field(ge=0)] = 0.0
    whole_state_per_param: Annotated[float, Field(ge=0)] = 0.0
    whole_share: Annotated[float, Field(ge=0, le=1)] = 0.0
