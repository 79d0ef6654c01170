"""Try an optimizer class of the user's: does it treat parameters as the train settings say?

Where parameters are spread over ranks, an optimizer sees some of them, or parts of them. One that looks at
more than its contract says would train another model, and nothing would show it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.optimizing.named import where_raised
from spindle_cli.workload.optimizing.optimizer import make_optimizer
from spindle_cli.workload.settings.optimizers import OptimizerChoice

# What checkpoints keep of a parameter under keys of their own, beside an optimizer's.
RESERVED_KEYS = ("master", "ema")
_STEPS = 3
_SHAPE = (6, 4)


def require_contract(choice: OptimizerChoice) -> None:
    """Refuse a class that steps two parameters together otherwise than each by itself, or, if it is to be
    element-wise, a parameter otherwise than its parts.

    Raises:
        WorkloadError: it does, it fails, or it keeps state under a name that checkpoints need.
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
    choice: OptimizerChoice, values: Sequence[Tensor], gradients: Sequence[tuple[Tensor, ...]]
) -> list[Tensor]:
    """The values after some steps with these gradients; what the class draws, it draws from one seed."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = make_optimizer(choice, parameters)
    assert optimizer is not None, "it has parameters"
    try:
        for given in gradients:
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        _require_free_keys(choice, optimizer)
    except WorkloadError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"{choice.place}: {choice.optimizer} failed in a step on parameters of shape "
            f"{tuple(values[0].shape)}: {type(error).__name__}: {error}{where_raised(error)}",
            hint="It has to step parameters of any shape"
            + (
                "."
                if choice.treats_elements_alone
                else " that it is given; give it matrices alone, by groups."
            ),
        ) from error
    return [parameter.detach() for parameter in parameters]


def _require_free_keys(choice: OptimizerChoice, optimizer: torch.optim.Optimizer) -> None:
    keys = {key for state in optimizer.state.values() for key in state}
    for key in RESERVED_KEYS:
        if key in keys:
            raise WorkloadError(
                f"{choice.place}: {choice.optimizer} keeps state named {key!r}, which checkpoints use "
                "themselves",
                hint="Give it another name in the class.",
            )
    odd = sorted(str(key) for key in keys if not isinstance(key, str) or "." in key)
    if odd:
        raise WorkloadError(
            f"{choice.place}: {choice.optimizer} keeps state named {odd[0]}; expected a name without dots"
        )
