"""Arguments that the zoo's `build` functions share, and their refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeVar

from spindle_cli.errors import WorkloadError

Size = Literal["paper", "laptop"]


def check_option(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is not one of `choices`.

    Raises:
        WorkloadError: names the argument, the value and the choices.
    """
    if value not in choices:
        raise WorkloadError(
            f"{name}: found {value!r}, expected one of {', '.join(str(choice) for choice in choices)}"
        )


def choose_batch_sizes(
    workload: str, defaults: Mapping[str, int], chosen: Mapping[str, int] | None
) -> dict[str, int]:
    """Samples per iteration of each task: as chosen, or by default.

    Raises:
        WorkloadError: `chosen` names a task that there is not.
    """
    for task in chosen or {}:
        check_option(f"{workload}: batch_sizes", task, tuple(defaults))
    return {**defaults, **(chosen or {})}


class _Spec(Protocol):
    @property
    def batch_size(self) -> int: ...


_S = TypeVar("_S", bound=_Spec)


def choose_spec(
    workload: str,
    specs: Mapping[Size, _S],
    size: Size,
    task: str,
    batch_sizes: Mapping[str, int] | None,
) -> tuple[_S, int]:
    """The sizes of a model that one task trains, and the task's samples per iteration: as chosen, or the
    spec's.

    Raises:
        WorkloadError: there is no such size, or `batch_sizes` names another task.
    """
    check_option(f"{workload}: size", size, tuple(specs))
    spec = specs[size]
    return spec, choose_batch_sizes(workload, {task: spec.batch_size}, batch_sizes)[task]
