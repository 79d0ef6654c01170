"""Islands of devices that average now and then alone, as a workload file asks for it. No torch.

Local SGD (Stich, arXiv 1805.09767) and DiLoCo (Douillard et al., arXiv 2311.08105): each island trains its
own copy of the model on its own part of every batch; after every so many steps the copies are brought
together. It trains another model than plain PyTorch does, so that nothing but the workload file turns it on.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from spindle_cli.files.artifact import Model, require_known_keys

# Beyond it, what every step tells of each island's losses would be what takes time.
MOST_ISLANDS = 64
_WHOLE_BITS = 32  # of numbers that are sent as they are


class OuterSettings(Model):
    """The outer optimizer, `torch.optim.SGD`, whose gradient is how far the islands have moved, on average,
    from their last common point. With `lr: 1` and `momentum: 0` the new common point is the islands' mean,
    as in local SGD; the defaults are DiLoCo's.

    Attributes:
        lr: Its learning rate.
        momentum: Its momentum.
        nesterov: Whether the momentum is Nesterov's; it goes with a momentum above 0.
    """

    lr: Annotated[float, Field(gt=0)] = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = True

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict | OuterSettings):
            raise ValueError("expected a dict, such as {lr: 0.7, momentum: 0.9, nesterov: true}")
        require_known_keys(data, cls.model_fields)
        if isinstance(data, dict) and data.get("momentum") == 0 and "nesterov" not in data:
            return {**data, "nesterov": False}  # which is of the momentum
        return data

    @model_validator(mode="after")
    def _nesterov_is_of_a_momentum(self) -> OuterSettings:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: goes with a momentum above 0")
        return self


class LocalSgd(Model):
    """Islands of devices that average only now and then.

    Attributes:
        islands: How many copies of the model are trained, each on an equal part of every batch.
        every: After so many steps there is an outer step, which brings the copies together.
        outer: The optimizer of outer steps.
        bits: Bits of each number that an island sends then; 32: as it is, else rounded.
    """

    islands: Annotated[int, Field(ge=2, le=MOST_ISLANDS)]
    every: Annotated[int, Field(ge=1, le=1_000_000)]
    outer: OuterSettings = Field(default_factory=OuterSettings)
    bits: Literal[32, 16, 8] = 32

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict | LocalSgd):
            raise ValueError("expected a dict, such as {islands: 2, every: 500}")
        require_known_keys(data, cls.model_fields)
        return data

    def has_outer_step(self, steps_done: int) -> bool:
        """Whether the islands average after so many steps."""
        return steps_done % self.every == 0

    @property
    def is_rounded(self) -> bool:
        """Whether what is sent has fewer bits."""
        return self.bits < _WHOLE_BITS

    @property
    def sent_share(self) -> float:
        """Bytes that are sent of each byte of a parameter."""
        return self.bits / _WHOLE_BITS

    @property
    def state_per_param(self) -> float:
        """Bytes that are kept for it per byte of trained parameter: the common point, and the momentum."""
        return 2.0 if self.outer.momentum else 1.0


def require_with_islands(local_sgd: LocalSgd, train: dict[str, Any]) -> None:
    """Refuse the train settings, by their keys, that say nothing of islands, or count steps otherwise.

    Raises:
        ValueError: naming the setting.
    """
    every = local_sgd.every
    for key in ("steps", "eval_every"):
        count = train[key]
        if count is not None and count % every:
            raise ValueError(
                f"local_sgd: {key}: {count} is no multiple of local_sgd.every, {every}, and islands have "
                f"different models then; expected one, such as {nearest_multiples(count, every)}"
            )
    for key in ("sampling", "ema"):
        if train[key] is not None:
            raise ValueError(f"local_sgd: does not go with {key}: leave out one of the two")
    if train["precision"] not in ("full", "bf16-autocast"):
        raise ValueError(
            f"local_sgd: does not go with precision: {train['precision']}; expected full or bf16-autocast"
        )


def nearest_multiples(steps: int, every: int) -> str:
    """Return the numbers of steps next to one that islands do not average after, for people."""
    below = steps - steps % every
    return f"{below} or {below + every}" if below else str(below + every)
