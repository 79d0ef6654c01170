"""Try an optimizer class of the user's: does it treat parameters as the train settings say?

Where parameters are spread over ranks, an optimizer sees some of them, or parts of them. One that looks at
more than its contract says would train another model, and nothing would show it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.optimizing.optimizer import make_optimizer, where_raised
from spindle_cli.workload.settings.updates import OptimizerChoice

# What checkpoints keep of a parameter under keys of their own, beside an optimizer's.
RESERVED_KEYS = ("master", "ema", "common", "outer_momentum")
_STEPS = 3
_SHAPE = (6, 4)


def require_contract(choice: OptimizerChoice) -> None:
    """Refuse a class that steps two parameters together otherwise than each by itself, or, if it is to be
    element-wise, a parameter otherwise than its parts; and one that a checkpoint would not bring back.

    Raises:
        WorkloadError: it does, it fails, or it keeps what checkpoints cannot hold.
    """
    if not choice.is_imported:
        return
    values = _numbers(0, _SHAPE), _numbers(1, _SHAPE)
    gradients = [tuple(_numbers(10 * step + which, _SHAPE) for which in (2, 3)) for step in range(_STEPS)]
    together = _stepped(choice, values, gradients)
    alone = [_stepped(choice, [values[which]], [(each[which],) for each in gradients])[0] for which in (0, 1)]
    if not all(map(torch.equal, together, alone)):
        raise WorkloadError(
            f"{choice.place}: {choice.optimizer} steps two parameters together otherwise than each by "
            "itself; devices hold different ones",
            hint="Use an optimizer that looks at one parameter at a time.",
        )
    reloaded = _stepped(choice, values, gradients, begins_anew=True)
    if not all(map(torch.equal, together, reloaded)):
        raise WorkloadError(
            f"{choice.place}: {choice.optimizer} steps otherwise once its state is loaded again; what it "
            "keeps outside of `state` and `param_groups` is in no checkpoint",
            hint="Keep it in `self.state[parameter]`.",
        )
    if not choice.treats_elements_alone:
        return
    flat = [value.reshape(-1) for value in values[:1]]
    cut = _SHAPE[0] * _SHAPE[1] // 3
    parts = [flat[0][:cut], flat[0][cut:]]
    of_parts = [(each[0].reshape(-1)[:cut], each[0].reshape(-1)[cut:]) for each in gradients]
    if not torch.equal(torch.cat(_stepped(choice, parts, of_parts)), together[0].reshape(-1)):
        raise WorkloadError(
            f"{choice.place}: {choice.optimizer} steps a parameter otherwise than its parts, so that it "
            "is not element-wise",
            hint="Say `contract: whole`, or leave it out.",
        )


def _numbers(seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _stepped(
    choice: OptimizerChoice,
    values: Sequence[Tensor],
    gradients: Sequence[tuple[Tensor, ...]],
    *,
    begins_anew: bool = False,
) -> list[Tensor]:
    """The values after some steps with these gradients; with `begins_anew` the last is that of a new
    optimizer, which is given the state of the first.
    """
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = _made(choice, parameters)
    try:
        for number, given in enumerate(gradients, start=1):
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = gradient.clone()
            if begins_anew and number == len(gradients):
                content = optimizer.state_dict()
                optimizer = _made(choice, parameters)
                optimizer.load_state_dict(content)
            optimizer.step()
    except Exception as error:
        raise WorkloadError(
            f"{choice.place}: {choice.optimizer} failed in a step on parameters of shape "
            f"{tuple(values[0].shape)}: {type(error).__name__}: {error}{where_raised(error)}",
            hint="It has to step matrices, and where it is element-wise vectors too.",
        ) from error
    _require_savable(choice, optimizer)
    return [parameter.detach() for parameter in parameters]


def _made(choice: OptimizerChoice, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    made = make_optimizer(choice, parameters)
    assert made is not None, "it has parameters"
    return made


def _require_savable(choice: OptimizerChoice, optimizer: torch.optim.Optimizer) -> None:
    """Refuse state that a checkpoint cannot hold."""
    items = {key: value for state in optimizer.state.values() for key, value in state.items()}
    for key, value in items.items():
        if key in RESERVED_KEYS:
            raise WorkloadError(
                f"{choice.place}: {choice.optimizer} keeps state named {key!r}, which checkpoints use "
                "themselves",
                hint="Give it another name in the class.",
            )
        if not isinstance(key, str) or "." in key:
            raise WorkloadError(
                f"{choice.place}: {choice.optimizer} keeps state named {key!r}; expected a text without dots"
            )
        if value is not None and not isinstance(value, Tensor | int | float):
            raise WorkloadError(
                f"{choice.place}: {choice.optimizer} keeps {key!r} as a {type(value).__name__}; expected "
                "tensors and numbers, which checkpoints hold"
            )
