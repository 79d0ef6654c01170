"""The workload file: which function builds the workload, with which arguments, and how it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.workload.names.init_from import InitSources

# Bytes of optimizer state over bytes of parameters, of the optimizers that step each element by itself.
_STATE_PER_PARAM = {
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


Precision = Literal["full", "bf16-autocast", "bf16"]
CompileBackend = Literal["inductor", "aot_eager"]
Reduce = Literal["float32", "parameters"]
MatmulPrecision = Literal["highest", "high", "medium"]


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


class TrainSettings(Model):
    """How a workload is trained.

    `optimizer`: the name of a class of torch.optim; `optimizer_args`: its keyword arguments besides the
    learning rate `lr`.
    `seed`: of the initial values and of the order of the samples.
    `clip_norm`: before each update the gradients of all parameters together are scaled down to this norm
    where theirs is larger; None: never. `schedule`: of the learning rate; None: it stays `lr`.
    `shard_optimizer`: devices that hold the same parameters share their optimizer state, each a range of the
    elements (ZeRO-1); an optimizer that looks at a parameter as a whole keeps it whole on each.
    `precision`: 'full': in the workload's own numbers. 'bf16-autocast': forward passes run in torch.autocast
    with bfloat16. 'bf16': everything is bfloat16, but for float32 masters of the parameters, which the
    optimizer steps and which start from the parameters as rounded.
    `reduce`: in which numbers gradients are added up, over batches and over ranks: 'float32', or those of
    the 'parameters'; None: float32 where the parameters are bfloat16.
    `float32_matmul`: how exactly float32 matrices are multiplied, as torch.set_float32_matmul_precision has
    it; None: as torch does by itself.
    `accumulate`: batches of every task in one step, one after the other. The step's loss is that of a batch
    of all their samples: the mean of means, the sum of sums; losses that couple samples do so in each batch.
    `compile`: operators run through torch.compile with this backend, but for those that tensor parallelism
    splits; None: as they are. 'aot_eager' only takes the compiler's way to the same kernels.
    """

    optimizer: Annotated[str, Field(min_length=1)] = "AdamW"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    optimizer_args: dict[str, Any] = Field(default_factory=dict)
    steps: Annotated[int, Field(ge=1)] = 200
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    schedule: Schedule | None = None
    shard_optimizer: bool = True
    precision: Precision = "full"
    reduce: Reduce | None = None
    float32_matmul: MatmulPrecision | None = None
    accumulate: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    compile: CompileBackend | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        unknown = [key for key in data if key not in cls.model_fields] if isinstance(data, dict) else []
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; known are {', '.join(cls.model_fields)}")
        return data

    @field_validator("compile", mode="before")
    @classmethod
    def _true_is_the_usual_backend(cls, value: Any) -> Any:
        if isinstance(value, bool):
            return "inductor" if value else None
        return value

    @model_validator(mode="after")
    def _float32_sums_are_of_fewer_bits(self) -> TrainSettings:
        if self.reduce == "float32" and self.precision == "full":
            raise ValueError(
                "reduce: float32 goes with precision: bf16 (or bf16-autocast, whose gradients are float32 "
                "anyway); with precision: full gradients have the numbers of their parameters"
            )
        return self

    def in_full_precision(self) -> TrainSettings:
        """The same settings for the workload's own numbers."""
        return self.model_copy(update={"precision": "full", "reduce": None})

    @property
    def widens_gradients(self) -> bool:
        """Whether gradients are added up in float32 though their parameters have fewer bits."""
        return self.precision == "bf16" and self.reduce != "parameters"

    @property
    def gradient_bytes_per_param(self) -> float:
        """Bytes of gradients per byte of trained parameters."""
        return 2.0 if self.widens_gradients else 1.0

    @property
    def shards_optimizer_state(self) -> bool:
        """Whether each device keeps optimizer state for its range of its parameters alone."""
        return self.shard_optimizer and self.treats_elements_alone

    @property
    def treats_elements_alone(self) -> bool:
        """Whether the optimizer is known to keep nothing but numbers and tensors of a parameter's shape."""
        return self.optimizer in _STATE_PER_PARAM

    @property
    def optimizer_state_per_param(self) -> float:
        """Bytes of optimizer state per byte of trained parameter, masters included.

        AdamW 2, SGD 0, SGD with momentum 1; in bf16 6, 2 and 4.
        """
        state = _STATE_PER_PARAM.get(self.optimizer, 2.0)
        if self.optimizer == "SGD" and self.optimizer_args.get("momentum"):
            state = 1.0
        if self.optimizer_args.get("amsgrad"):
            state += 1.0
        # Masters and their state have twice the bytes of the parameters.
        return 2 * (1 + state) if self.precision == "bf16" else state

    @property
    def update_bytes_per_param(self) -> float:
        """Bytes that an update takes for each byte of the parameters that a rank steps: in bf16 the float32
        gradients of the masters, unless gradients are float32 already.
        """
        return 2.0 if self.precision == "bf16" and not self.widens_gradients else 0.0


class WorkloadFile(Artifact):
    """The workload file. `model`: 'package.module:function' or 'path/to/file.py:function', relative to this
    file. `init_from`: the files that initial values are taken from.
    """

    KIND: ClassVar[str] = "workload"

    schema_: Annotated[Literal["spindle.workload/1"], Field(alias="schema")] = "spindle.workload/1"
    model: Annotated[str, Field(min_length=1)]
    args: dict[str, Any] = Field(default_factory=dict)
    init_from: InitSources = ()
    train: TrainSettings = Field(default_factory=TrainSettings)

    @model_validator(mode="before")
    @classmethod
    def _no_key_misspelt(cls, data: Any) -> Any:
        """Other keys are let be, as a newer version's; but one that is nearly ours would be passed over."""
        known = ["schema", *(key for key in cls.model_fields if not key.endswith("_"))]
        for key in data if isinstance(data, dict) else ():
            if key not in (*known, "schema_") and (meant := get_close_matches(str(key), known, 1, 0.7)):
                raise ValueError(f"unknown key {key!r}; is {meant[0]!r} meant?")
        return data


@contextmanager
def naming_the_file(source: str) -> Iterator[None]:
    """Say of what is found to be wrong with train settings inside which workload has them."""
    try:
        yield
    except InputError as error:
        if error.message.startswith("train"):
            error.message = f"{source}: {error.message}"
        raise
