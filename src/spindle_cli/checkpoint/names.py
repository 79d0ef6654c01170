"""The names of tensors in a checkpoint. No torch.

They are the keys of a flattened state dict: `model.<name>`, `optimizer.state.<name>.<key>`,
`buffers.<rank>.<name>`, `random.<device type>.<rank>`; `<name>` is the user's own, with the task's in front.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

# Of a parameter's optimizer state, the moving average of the weights.
AVERAGE_KEY = "ema"
# Of islands that average now and then alone: their last common point, and the outer optimizer's momentum.
COMMON_KEY, OUTER_MOMENTUM_KEY = "common", "outer_momentum"


def model_key(name: str) -> str:
    """A parameter, by its canonical name."""
    return f"model.{name}"


def state_key(name: str, key: str) -> str:
    """A parameter's optimizer state by the optimizer's own key."""
    return f"optimizer.state.{name}.{key}"


def optimizer_keys(names: Iterable[str]) -> dict[str, list[str]]:
    """Parameter -> the optimizer's keys, of all the names of a checkpoint."""
    found: dict[str, list[str]] = {}
    for name in names:
        if name.startswith("optimizer.state."):
            parameter, key = _parameter_and_key(name)
            found.setdefault(parameter, []).append(key)
    return found


def buffer_key(name: str, rank: int) -> str:
    """One rank's own value of a buffer."""
    return f"buffers.{rank}.{name}"


def random_key(device_type: str, rank: int) -> str:
    """The state of a rank's generator."""
    return f"random.{device_type}.{rank}"


def every_name(names: Iterable[str], aliases: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Every name under which a saved tensor can be asked for -> the one under which it is saved.

    Args:
        names: under which tensors are saved.
        aliases: as in `Checkpoint`.

    Returns:
        Also a buffer's name as part of the model, for the value of the first rank that has one.
    """
    found = {name: name for name in names}
    buffers = sorted(map(_rank_and_buffer, (name for name in found if name.startswith("buffers."))))
    for rank, buffer in buffers:
        found.setdefault(model_key(buffer), buffer_key(buffer, rank))
    for name, saved in list(found.items()):
        kind, _, tensor = name.partition(".")
        if kind == "model":
            found.update((model_key(other), saved) for other in aliases.get(tensor, ()))
        elif kind == "optimizer":
            parameter, key = _parameter_and_key(name)
            found.update((state_key(other, key), saved) for other in aliases.get(parameter, ()))
    return found


def _rank_and_buffer(name: str) -> tuple[int, str]:
    _, rank, buffer = name.split(".", 2)
    return int(rank), buffer


def _parameter_and_key(name: str) -> tuple[str, str]:
    parameter, _, key = name.removeprefix("optimizer.state.").rpartition(".")
    return parameter, key


def model_names(names: Iterable[str]) -> dict[str, None]:
    """Canonical names of the parameters and buffers among saved tensors."""
    found = dict.fromkeys(name.removeprefix("model.") for name in names if name.startswith("model."))
    return found | dict.fromkeys(_rank_and_buffer(name)[1] for name in names if name.startswith("buffers."))
