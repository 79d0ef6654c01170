"""The callbacks that train settings name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.source import Wanted, named_function
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.refuse import place_of_error

# Those that come with Spindle, by their short names.
_OWN = {
    "tensorboard": "spindle_cli.runtime.following.tensorboard:TensorBoard",
    "wandb": "spindle_cli.runtime.following.wandb:WeightsAndBiases",
}
_CALLBACK = Wanted(
    "a callback",
    "a spindle_cli.Callback",
    f"Expected 'package.module:Class', 'path/to/file.py:Class', {' or '.join(map(repr, _OWN))}.",
)


ABSENT = (
    "What other devices alone have of the model is on the meta device here, without values: a checkpoint has "
    "all of it (at_checkpoint)."
)


def is_absent(error: Exception) -> bool:
    """Whether an error says that values were asked for which are not on this device."""
    return re.search(r"\bmeta (tensor|device)", str(error)) is not None


def find_callbacks(train: TrainSettings, source: str) -> tuple[Callable[[], Any], ...]:
    """Return what makes each callback that the train settings of a workload name; nothing is made yet.

    Args:
        source: of the workload; paths start from its file's folder.

    Raises:
        InputError: no such file, module or class.
        WorkloadError: the user's file fails while being imported.
    """
    return tuple(
        partial(_make, function, setting.args, f"{source}: train.callbacks[{number}]")
        for number, (setting, function) in enumerate(
            zip(train.callbacks, callback_classes(train, source), strict=True)
        )
    )


def callback_classes(train: TrainSettings, source: str) -> tuple[Callable[..., Any], ...]:
    """Return the class of each callback, or what makes one; arguments and errors as of `find_callbacks`."""
    folder = Path(source).parent if source.endswith((".yaml", ".yml", ".json")) else Path.cwd()
    return tuple(
        named_function(
            _OWN.get(setting.callback, setting.callback),
            folder,
            where=f"{source}: train.callbacks[{number}]",
            wanted=_CALLBACK,
        )
        for number, setting in enumerate(train.callbacks)
    )


def _make(function: Callable[..., Any], args: dict[str, Any], where: str) -> Any:
    try:
        return function(**args)
    except WorkloadError:
        raise
    except (TypeError, ValueError) as error:
        place = place_of_error(error)
        at = f", at {place}" if place else ""
        raise WorkloadError(
            f"{where}: cannot be made with args={args!r}: {type(error).__name__}: {error}{at}",
            hint=ABSENT if is_absent(error) else "Correct its args: keyword arguments of the class.",
        ) from error
