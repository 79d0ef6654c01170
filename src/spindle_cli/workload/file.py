"""The workload file: which function builds the workload, with which arguments, and how it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, Model, require_known_keys, shown
from spindle_cli.workload.init_from import InitSources
from spindle_cli.workload.settings.types import LoaderSettings, LocalSgd, Sampling, require_with_islands
from spindle_cli.workload.settings.updates import (
    Average,
    Contract,
    GroupRule,
    LossScaleSettings,
    OptimizerChoice,
    Ramp,
    RampSettings,
    TaskWeightSettings,
    groups_of,
    require_distinct,
)
from spindle_cli.workload.settings.updates import Schedule as Schedule

Precision = Literal["full", "bf16-autocast", "fp16-autocast", "bf16"]
CompileBackend = Literal["inductor", "aot_eager"]
Reduce = Literal["float32", "parameters"]
MatmulPrecision = Literal["highest", "high", "medium"]
MOST_CHUNKS = 1_000_000


def _of_chunks(value: Any) -> Any:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value != "auto" and not (is_number and 1 <= value <= MOST_CHUNKS):
        raise ValueError(f"expected auto, or a whole number of chunks from 1 to {MOST_CHUNKS:,}")
    return value


LossChunks = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_CHUNKS)], BeforeValidator(_of_chunks)
]


class CallbackSettings(Model):
    """A callback by name.

    Attributes:
        callback: 'tensorboard', 'wandb', 'package.module:Class', or, relative to the workload file,
            'path/to/file.py:Class'.
        args: Keyword arguments of the class.
    """

    callback: Annotated[str, Field(min_length=1)]
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _a_name_alone(cls, data: Any) -> Any:
        require_known_keys(data, cls.model_fields)
        return {"callback": data} if isinstance(data, str) else data


class TrainSettings(RampSettings):
    """How a workload is trained.

    Attributes:
        optimizer: Name of a class of torch.optim, or 'package.module:Class' or 'path/to/file.py:Class'. LBFGS
            and SparseAdam are refused.
        contract: What a class by import path does: `element-wise`: it treats each element of a parameter by
            itself, so that parameters may be cut anywhere; `whole`, and without it: each parameter as a
            whole.
        lr: Learning rate.
        optimizer_args: Keyword arguments of the optimizer besides `lr`.
        groups: Rules that give parameters other settings or another optimizer; every trained parameter fits
            exactly one. `no_decay` alone is short for `[no_decay, rest]`.
        steps: How many steps are trained.
        seed: Seed of the initial values and of the order of the samples.
        clip_norm: Before each update the gradients of all parameters together, of all groups, are scaled down
            to this norm where theirs is larger, as by `torch.nn.utils.clip_grad_norm_`; absent: never.
        clip_value: Before each update each element of the gradients is brought to this size at most, as by
            `torch.nn.utils.clip_grad_value_`, after all sums and without the loss scale. Not together with
            `clip_norm`. It needs no sum over ranks, so parameters may still be updated in parts.
        schedule: A class of torch.optim.lr_scheduler that says how the learning rate changes; without it, and
            without warm-up and decay, it stays `lr`.
        ema: A moving average of the weights, beside them; absent: none.
        task_weights: Weights of tasks' losses where they change: [[step, weight], ...] by task, steps counted
            from 0, linear between two; or 'package.module:function', function(step) -> weights by task. Other
            tasks, and all without it, keep `Task.weight`.
        sampling: Which tasks run at which step; without it all run at every step.
        shard_optimizer: Whether devices that hold the same parameters share their optimizer state, each a
            range of the elements (ZeRO-1); an optimizer that looks at a parameter as a whole keeps it whole
            on each. Without it and without clipping, devices may update parts of the parameters before all
            gradients are summed. A run may go on with the other setting.
        precision: `full`: in the workload's own numbers. `bf16-autocast`: forward passes run in
            torch.autocast with bfloat16, while parameters, their gradients and what moves between devices
            stay as they are; `fp16-autocast`: with float16, and a loss scale. `bf16`: parameters, gradients,
            activations and batch fields are bfloat16, but for float32 masters of the parameters, which the
            optimizer steps and which start from the parameters as rounded. Times, plans and verification are
            of this precision.
        loss_scale: What losses are multiplied by with `fp16-autocast`; a number: it never changes; absent: as
            `torch.amp.GradScaler` does it by itself.
        reduce: In which numbers gradients are added up, over batches and over ranks: `float32`, or those of
            the `parameters` (with `bf16`: in half the memory and with half the bytes between devices);
            absent: float32 where the parameters are bfloat16. `float32` is refused with `precision: full`.
            Before torch 2.10, `bf16` needs `parameters`.
        float32_matmul: How exactly float32 matrices are multiplied, as torch.set_float32_matmul_precision has
            it; on GPUs `high` takes TF32. Absent: as torch does by itself. It is no part of the fingerprint:
            profile again after changing it.
        accumulate: Batches of every task in one step, one after the other, with one update by all of them
            together. The step's loss is that of one batch of all their samples, also of a mean over what
            counts and of a sum; a loss that stays whole is the mean of the batches' losses. Memory is that of
            one batch. `iteration_s` of metrics.jsonl is a whole step's; predicted.json compares a part of it.
        compile: Backend of torch.compile that operators run through, and are measured and planned with, but
            for those that tensor parallelism splits; `true`: inductor; absent, or `false`: as they are.
            `aot_eager` only takes the compiler's way to the same kernels, for testing. `launch` warns if a
            plan was made for the other setting; a run may go on with it.
        callbacks: Who follows the run. It does not change what is trained.
        eval_every: Tasks that have an `eval_dataset` are evaluated after every so many steps; absent: after
            the last step alone. It does not change what is trained.
        loader: By how many processes samples are loaded, and how far ahead.
        loss_chunks: How many chunks a share of a loss is computed in, where its widest value (the logits of a
            large vocabulary) is cut: `auto`: none with more elements than the parameters that make it, or
            than 2^24; a number: so many, as far as there are samples or positions to cut; 1: in one go.
            Profile again after changing it; `launch` warns if a plan was made for another.
        local_sgd: Islands of devices train copies of the model, and average after every so many steps alone;
            another model is trained than by plain PyTorch. Absent: all devices train one.
    """

    optimizer: Annotated[str, Field(min_length=1)] = "AdamW"
    contract: Contract | None = None
    lr: Annotated[float, Field(gt=0)] = 1e-3
    optimizer_args: dict[str, Any] = Field(default_factory=dict)
    groups: Annotated[tuple[GroupRule, ...], Field(min_length=1)] | None = None
    steps: Annotated[int, Field(ge=1)] = 200
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    clip_value: Annotated[float, Field(gt=0)] | None = None
    schedule: Schedule | None = None
    ema: Average | None = None
    task_weights: TaskWeightSettings | None = None
    sampling: Sampling | None = None
    shard_optimizer: bool = True
    precision: Precision = "full"
    loss_scale: LossScaleSettings | None = None
    reduce: Reduce | None = None
    float32_matmul: MatmulPrecision | None = None
    accumulate: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    compile: CompileBackend | None = None
    callbacks: tuple[CallbackSettings, ...] = ()
    eval_every: Annotated[int, Field(ge=1)] | None = None
    loader: LoaderSettings = Field(default_factory=LoaderSettings)
    loss_chunks: LossChunks = "auto"
    local_sgd: LocalSgd | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        require_known_keys(data, cls.model_fields)
        return data

    @field_validator("groups", mode="before")
    @classmethod
    def _words_are_lists(cls, value: Any) -> Any:
        return groups_of(value)

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
                "reduce: float32 goes with precision: bf16 (or bf16-autocast and fp16-autocast, whose "
                "gradients are float32 anyway); with precision: full gradients have the numbers of their "
                "parameters"
            )
        return self

    @model_validator(mode="after")
    def _clips_in_one_way(self) -> TrainSettings:
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError(
                f"clip_norm: {self.clip_norm:g} and clip_value: {self.clip_value:g}: expected one of "
                "them, as which came first would make another model"
            )
        return self

    @model_validator(mode="after")
    def _float16_alone_is_scaled(self) -> TrainSettings:
        if self.loss_scale is not None and self.precision != "fp16-autocast":
            raise ValueError(
                "loss_scale: goes with precision: fp16-autocast; gradients in other numbers neither vanish "
                "nor overflow"
            )
        return self

    @model_validator(mode="after")
    def _groups_are_told_apart(self) -> TrainSettings:
        require_distinct(self.groups or ())
        if self.contract is not None and ":" not in self.optimizer:
            raise ValueError("contract: goes with an optimizer by import path, 'package.module:Class'")
        self.require_sound(self.steps, self.schedule, {choice.name: choice.lr for choice in self.choices})
        for choice in self.choices:
            self.schedule_of(choice.name)
        return self

    @model_validator(mode="after")
    def _goes_with_islands(self) -> TrainSettings:
        if self.local_sgd is not None:
            require_with_islands(self.local_sgd, dict(self))
        return self

    @property
    def ramp(self) -> Ramp | None:
        """Warm-up and decay of the learning rate; None where `schedule` says it, or nothing does."""
        return self.ramp_to(self.steps)

    @property
    def choices(self) -> tuple[OptimizerChoice, ...]:
        """The settings of each optimizer group; without groups, one for all parameters."""
        default = OptimizerChoice(
            name=None,
            optimizer=self.optimizer,
            lr=self.lr,
            arguments=self.optimizer_args,
            contract=self.contract,
            place="train",
        )
        return (default,) if self.groups is None else tuple(_choice_of(rule, default) for rule in self.groups)

    def schedule_of(self, group: str | None) -> Schedule | None:
        """Return what `schedule` says for an optimizer group, by its name; None without one.

        Raises:
            ValueError: it has a list for the groups that is of another length.
        """
        names = [choice.name for choice in self.choices]
        return None if self.schedule is None else self.schedule.of_group(names.index(group), names)

    def in_full_precision(self) -> TrainSettings:
        """Return these settings for training in the workload's own numbers."""
        return self.model_copy(update={"precision": "full", "reduce": None, "loss_scale": None})

    @property
    def autocast(self) -> Literal["bfloat16", "float16"] | None:
        """What forward passes are cast to, by torch's name of it; None: to nothing."""
        if self.precision == "bf16-autocast":
            return "bfloat16"
        return "float16" if self.precision == "fp16-autocast" else None

    @property
    def scaling(self) -> LossScaleSettings | None:
        """What losses are multiplied by; None: by nothing."""
        if self.precision != "fp16-autocast":
            return None
        return self.loss_scale or LossScaleSettings()

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
        """Whether each device keeps optimizer state for its range of its parameters alone, of those whose
        optimizer treats elements by themselves.
        """
        return self.shard_optimizer and any(choice.treats_elements_alone for choice in self.choices)

    @property
    def updates_by_parts(self) -> bool:
        """Whether some parameters may be stepped before the gradients of all are there: nothing is found out
        about all gradients first, no optimizer state is shared, copies of islands are not averaged, and every
        optimizer is known to step each parameter by itself.
        """
        judges = self.clip_norm is not None or self.scaling is not None
        apart = not judges and not self.shard_optimizer and self.local_sgd is None
        return apart and all(choice.steps_parameters_alone for choice in self.choices)

    def state_per_param(self, state: float) -> float:
        """Bytes that are kept for the update per byte of trained parameter, with masters and average.

        AdamW 2, SGD 0, SGD with momentum 1; in bf16 6, 2 and 4.

        Args:
            state: of the optimizer alone, per byte of what it steps.
        """
        average = 0.0 if self.ema is None else 1.0
        if self.local_sgd is not None:
            average += self.local_sgd.state_per_param
        # Masters, their state and their average have twice the bytes of the parameters.
        return 2 * (1 + state + average) if self.precision == "bf16" else state + average

    @property
    def update_bytes_per_param(self) -> float:
        """Bytes that an update takes for each byte of the parameters that a rank steps: in bf16 the float32
        gradients of the masters, unless gradients are float32 already.
        """
        return 2.0 if self.precision == "bf16" and not self.widens_gradients else 0.0


def _choice_of(rule: GroupRule, default: OptimizerChoice) -> OptimizerChoice:
    """Return a group's settings: its own, and what it does not say from those of `train`."""
    is_other = rule.optimizer is not None and rule.optimizer != default.optimizer
    return OptimizerChoice(
        name=rule.name,
        optimizer=rule.optimizer or default.optimizer,
        lr=default.lr if rule.lr is None else rule.lr,
        arguments=rule.optimizer_args if is_other else {**default.arguments, **rule.optimizer_args},
        contract=rule.contract if is_other else rule.contract or default.contract,
        place=f"train.groups: {rule.name}",
    )


class WorkloadFile(Artifact):
    """The workload file.

    Attributes:
        model: 'package.module:function' or 'path/to/file.py:function', relative to this file.
        args: Keyword arguments of the function.
        init_from: The files that initial values are taken from.
        train: How the workload is trained.
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
        keys = ["schema", *(key for key in cls.model_fields if not key.endswith("_"))]
        for key in data if isinstance(data, dict) else ():
            if key not in (*keys, "schema_") and (meant := get_close_matches(str(key), keys, 1, 0.7)):
                raise ValueError(f"unknown key {shown(key)}; is {meant[0]!r} meant?")
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
