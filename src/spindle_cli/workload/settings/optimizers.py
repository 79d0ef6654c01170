"""Which optimizer some parameters have, and how it treats them. No torch."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from spindle_cli.files.artifact import Model

# 'element-wise': it keeps, and steps, each element of a parameter by itself. 'whole': it looks at a parameter
# as a whole (a matrix, its rows), at each by itself.
Contract = Literal["element-wise", "whole"]
_PATH = r"^([A-Za-z_][A-Za-z0-9_.]*|[^:]*[^:/]\.py):[A-Za-z_][A-Za-z0-9_]*$"


def _is_path(value: object) -> object:
    if isinstance(value, str) and re.search(_PATH, value) is None:
        raise ValueError("expected package.module:name or path/to/file.py:name")
    return value


# 'package.module:Name' or 'path/to/file.py:Name', from the folder of the workload file.
ImportPath = Annotated[str, Field(pattern=_PATH), BeforeValidator(_is_path)]

# Bytes of optimizer state over bytes of parameters, of torch's optimizers that step each element by itself.
STATE_PER_PARAM = {
    "SGD": 0.0,
    "Adam": 2.0,
    "AdamW": 2.0,
    "NAdam": 2.0,
    "RAdam": 2.0,
    "Adamax": 2.0,
    "Adagrad": 1.0,
    "RMSprop": 1.0,
    "Adadelta": 2.0,
    "ASGD": 1.0,
    "Rprop": 2.0,
}
# Of those that look at whole matrices, for a matrix.
_WHOLE_STATE_PER_PARAM = {"Muon": 1.0}
# Where nothing is known.
_USUAL_STATE = 2.0


class OptimizerChoice(Model):
    """An optimizer and its numbers, for all or some of the parameters.

    `name`: of the optimizer group; None: there is one for all parameters. `optimizer`: a class of torch.optim
    by name, or any by import path. `contract`: what the file says of the latter. `place`: its key in the
    file, for messages.
    """

    name: str | None
    optimizer: str
    lr: float
    arguments: dict[str, Any]
    contract: Contract | None
    place: str

    @property
    def key(self) -> str:
        """Where the file says which optimizer, for messages."""
        return f"{self.place}.optimizer" if self.name is None else f"{self.place}: optimizer"

    @property
    def is_imported(self) -> bool:
        """Whether the class is not torch's."""
        return ":" in self.optimizer

    @property
    def treats_elements_alone(self) -> bool:
        """Whether it is known to keep nothing but numbers and tensors of a parameter's shape."""
        return self.contract == "element-wise" if self.is_imported else self.optimizer in STATE_PER_PARAM

    @property
    def steps_parameters_alone(self) -> bool:
        """Whether it is known to step each parameter by itself, so that it may step some at a time.

        Of torch's own those are that do so even with elements. A class of the user's may count its steps, or
        do something else once in each.
        """
        return not self.is_imported and self.optimizer in STATE_PER_PARAM

    @property
    def state_per_param(self) -> float:
        """Bytes of its state per byte of what it steps; a guess for a class that is not torch's."""
        state = STATE_PER_PARAM.get(self.optimizer, _WHOLE_STATE_PER_PARAM.get(self.optimizer, _USUAL_STATE))
        if self.optimizer == "SGD" and self.arguments.get("momentum"):
            state = 1.0
        if self.arguments.get("amsgrad"):
            state += 1.0
        return state
