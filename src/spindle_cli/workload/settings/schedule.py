"""How the learning rate changes from step to step, as a workload file says it. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from spindle_cli.files.artifact import Model


class Schedule(Model):
    """How the learning rate changes from step to step. `name`: a class of torch.optim.lr_scheduler; all other
    keys are its keyword arguments, counted in steps where the class says epochs.
    """

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)]

    @property
    def arguments(self) -> dict[str, Any]:
        """The class's keyword arguments besides the optimizer."""
        return dict(self.model_extra or {})
