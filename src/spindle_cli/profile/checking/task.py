"""The check of one task, op by op in the order of its graph.

Hooks on parameters' gradients are tried, too: they are called for each part of a gradient by itself.

Where a batch is split, or several ops use a parameter, its gradient is a sum of parts that different backward
passes and devices compute. Plain PyTorch calls the hooks once, for the sum; it is the same where a hook of a
sum gives the sum of what it gives for the parts (a mask of zeros and ones), and another model where it does
not (clipping, dividing by a norm).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.operators.tensor_parallel import LayerSplit
from spindle_cli.profile.checking.compare import OpShares, Run, first_line, largest_difference
from spindle_cli.profile.checking.forward import compare_with_forward, refuse_read_of_backward
from spindle_cli.profile.checking.values import Values, choose_samples, made_real, stand_in
from spindle_cli.profile.numeric_check import TaskCheck
from spindle_cli.training.data.reading import first_batch
from spindle_cli.training.precision import NoRandomness, constants_in, dtype_in
from spindle_cli.units import format_bytes
from spindle_cli.workload.building.attributes import watching
from spindle_cli.workload.building.memory import RefusingWrites, handed_out
from spindle_cli.workload.graph import DECLARE, Op, TaskGraph, ValueSpec
from spindle_cli.workload.refuse import place_inside, place_of_error, refusal
from spindle_cli.workload.refuse import place_of as place_of_code
from spindle_cli.workload.types import FlowTask

# What an op takes, in copies of its parameters and of the values that it takes and gives, roughly: gradients,
# copies for shares, and what autograd keeps.
_PARAMETER_COPIES = 4
_VALUE_COPIES = 16


@dataclass(frozen=True)
class CheckLimits:
    """When no more is checked (a time of `monotonic`, `max_s` after the beginning); bytes of one op."""

    ends: float
    max_s: float
    max_bytes: int

    def require_time(self) -> None:
        """Raises NotCheckedError: time is over."""
        if monotonic() > self.ends:
            raise NotCheckedError(f"the check's {self.max_s:g} s were over")

    def require_room(self, parameters: int, values: int) -> None:
        """Refuses a check of so many elements where memory does not suffice.

        Raises:
            NotCheckedError: it takes more than is allowed.
        """
        needed = torch.float64.itemsize * (_PARAMETER_COPIES * parameters + _VALUE_COPIES * values)
        if needed > self.max_bytes:
            raise NotCheckedError(
                f"it needs about {format_bytes(needed)} in float64, more than {format_bytes(self.max_bytes)}"
            )


class NotCheckedError(Exception):
    """Something cannot be checked; the message says why."""


@dataclass
class _Findings:
    """By op: those that agree, those that differ and why, and those that were not checked and why."""

    checked: set[int] = field(default_factory=set)
    whole: dict[int, str] = field(default_factory=dict)
    unchecked: dict[int, str] = field(default_factory=dict)
    largest: float = 0.0

    @property
    def seen(self) -> Collection[int]:
        """All that something was found of."""
        return self.checked | self.whole.keys() | self.unchecked.keys()


class TaskChecker:
    """Checks the ops of one task that may be split.

    Args:
        task: its graph.
        names: of the MetaOp of each op.
        seed: of its samples.
        limits: of time and memory.
        split_of: how tensor parallelism splits an op, whose vocabulary is then checked too.
    """

    def __init__(
        self,
        task: TaskGraph,
        names: Mapping[int, str],
        seed: int,
        limits: CheckLimits,
        split_of: Callable[[Op], LayerSplit | None] = lambda _: None,
    ) -> None:
        self._split_of = split_of
        self._seen_backward: set[int] = set()  # ops that run whole
        self._kinds: set[str] = set()  # of the ops whose sequence, or experts, were shared out
        self._task = task
        self._names = names
        self._limits = limits
        self._seed = seed
        self._batch = choose_samples(task, seed)
        self._samples = len(next(iter(self._batch.values())))
        self._splits = [op for op in task.ops if not op.coupled] if self._samples > 1 else []

    def check(self) -> TaskCheck:
        """Check every op, and all of them together.

        Raises:
            WorkloadError: together they compute something else than the task's `forward`, or a parameter has
                a hook that must not see a part of its gradient.
        """
        findings = _Findings()
        untried = self._try_hooks()
        try:
            self._check_chain(findings)
        except NotCheckedError as error:
            self._leave(findings, str(error))
        for op in self._splits:
            if op.index in findings.checked and not untried.keys().isdisjoint(op.parameters):
                findings.checked.remove(op.index)
                findings.unchecked[op.index] = next(
                    untried[name] for name in op.parameters if name in untried
                )
        return self._result(findings, self._compare_with_forward())

    def check_loss(self) -> TaskCheck:
        """Check the loss by itself, on stand-ins for what it takes. Raises WorkloadError: as `check` does of
        hooks.
        """
        findings = _Findings()
        self._try_hooks()
        loss = self._task.ops[-1]
        if loss in self._splits:
            try:
                self._check_alone(loss, findings)
            except NotCheckedError as error:
                findings.unchecked[loss.index] = str(error)
        self._leave(findings, "an estimate runs no layers")
        return self._result(findings, "an estimate runs no layers")

    def _try_hooks(self) -> dict[str, str]:
        """Try the hooks of parameters, with values in the place of those on the meta device where there is
        room; gives and raises what `try_hooks` does.
        """
        root = self._task.root
        if not any(_hooks_of(parameter) for parameter in root.parameters()):
            return {}
        try:
            self._limits.require_room(sum(parameter.numel() for parameter in root.parameters()), 0)
        except NotCheckedError:
            return try_hooks(self._task)
        with made_real(root):
            return try_hooks(self._task)

    def _leave(self, findings: _Findings, why: str) -> None:
        for op in self._splits:
            if op.index not in findings.seen:
                findings.unchecked[op.index] = why

    def _check_alone(self, op: Op, findings: _Findings) -> None:
        def check(dtype: torch.dtype) -> None:
            values = self._task.values
            inputs = {name: stand_in(values[name], self._samples, dtype) for name in op.inputs}
            self._check_op(op, {**self._fields(dtype), **inputs}, findings, dtype)

        _in_either(check)

    def _check_chain(self, findings: _Findings) -> None:
        _in_either(lambda dtype: self._check_ops(findings, dtype))

    def _check_ops(self, findings: _Findings, dtype: torch.dtype) -> None:
        values = self._fields(dtype)
        for op in self._task.ops:
            left = [split for split in self._splits if split.index not in findings.seen]
            if not left and not any(self._writes_unknown(later) for later in self._task.ops):
                return
            self._limits.require_time()
            if op in left:
                values.update(self._check_op(op, values, findings, dtype))
            else:
                values.update(self._run(op, values, dtype))
            for name in op.inputs:
                if not any(name in later.inputs for later in self._task.ops[op.index + 1 :]):
                    del values[name]

    def _writes_unknown(self, op: Op) -> bool:
        """Whether the backward pass of an op that runs whole is to be seen yet, which may write into
        parameters.
        """
        return op not in self._splits and bool(op.parameters) and op.index not in self._seen_backward

    def _fields(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return _in_dtype(self._batch, dtype)

    def _check_op(
        self, op: Op, inputs: Mapping[str, Tensor], findings: _Findings, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Compare, and note what was found; gives the op's outputs."""
        self._require_room(op)
        values = Values.of_op(self._task, op, dtype)
        with values.held() as parameters, watching(self._task.root), constants_in(dtype):
            runs = OpShares(self._task, op, inputs, values, parameters)
            try:
                whole = runs.whole(self._samples)
            except Exception as error:
                self._refuse_array(op, error)
                raise _DoesNotRunError(f"{place_of(op)}fails by itself: {first_line(error)}") from error
            self._refuse_written(op, runs.written_backward)
            try:
                shares = runs.in_shares((0, 1, self._samples))
                repeats = runs.draws_again(self._samples)
            except Exception as error:  # a share is what workers would run
                findings.whole[op.index] = (
                    f"{place_of(op)}it fails on shares of 1 and {self._samples - 1} samples: "
                    f"{first_line(error)}"
                )
                return whole.outputs
            if whole.is_finite and runs.watch.tolerance is not None:
                self._check_words(op, runs, whole, runs.watch.tolerance)
                self._check_positions(op, runs, whole, runs.watch.tolerance)
                self._check_experts(op, runs, whole, runs.watch.tolerance)
        what, relative = largest_difference(whole, shares)
        if not whole.is_finite:
            findings.unchecked[op.index] = f"{place_of(op)}it gives numbers that are none on drawn parameters"
        elif runs.watch.tolerance is None:
            findings.unchecked[op.index] = f"{place_of(op)}it computes in numbers of {runs.watch.bits} bits"
        elif repeats:
            findings.whole[op.index] = f"{place_of(op)}it draws the same random numbers in every share"
        elif relative > runs.watch.tolerance:
            findings.whole[op.index] = (
                f"{place_of(op)}on shares of 1 and {self._samples - 1} samples {what} differs from that of "
                f"the whole by {relative:.1e}"
            )
        else:
            findings.checked.add(op.index)
            findings.largest = max(findings.largest, relative)
        return whole.outputs

    def _refuse_written(self, op: Op, names: Sequence[str]) -> None:
        if names:
            raise self._written(op, f"the parameter {names[0]!r}", op.place)

    def _refuse_array(self, op: Op, error: Exception) -> None:
        """Refuse what an error says writes into an array over the memory of what is trained."""
        if (names := handed_out().refused_by_array(error)) is not None:
            raise self._written(op, names, place_of_error(error)) from error

    def _written(self, op: Op, what: str, place: str | None) -> WorkloadError:
        return refusal(
            self._task.task.name,
            f"the backward pass of {op.target or 'the loss'} writes into {what}, by a hook or a "
            "torch.autograd.Function: each device that has a share of the batch would do so",
            place,
            f"{DECLARE} What an operator's forward writes into its parameters is known, and runs whole.",
        )

    def _check_words(self, op: Op, runs: OpShares, whole: Run, tolerance: float) -> None:
        """Compare with what devices compute that share out the op's vocabulary.

        Raises:
            WorkloadError: it differs.
        """
        split = self._split_of(op)
        if split is None or not split.words:
            return
        for run in runs.in_words(split, self._samples):
            what, relative = largest_difference(whole, run)
            if relative > tolerance:
                raise WorkloadError(
                    f"{place_of(op)}split by words over {split.degree} devices, {what} of the op with "
                    f"{', '.join(sorted(split.words))} differs from that of the whole by {relative:.1e}",
                    hint="Keep heads and embeddings whole: Workload(..., tp_vocabulary=None).",
                )

    def _check_positions(self, op: Op, runs: OpShares, whole: Run, tolerance: float) -> None:
        """Compare with what devices compute that share out the sequence of the op's layer; of equal ops one.

        Raises:
            WorkloadError: it differs, and does not where they have all of it.
        """
        split = self._split_of(op)
        if split is None or split.sequence is None or op.kind in self._kinds:
            return
        self._kinds.add(op.kind)
        dims = {name: dim for name, dim in split.dims.items() if name not in split.words}
        joined = replace(split.sequence, taken=None, kept=frozenset())
        split = replace(split, dims=dims, words=frozenset(), sequence=joined)
        why = self._differs(runs, split, whole, tolerance)
        if why is None or self._differs(runs, replace(split, sequence=None), whole, tolerance) is not None:
            return
        raise WorkloadError(
            f"{place_of(op)}where {split.degree} devices have a part of the sequence each, {why}",
            hint="Keep sequences whole: Workload(..., tp_sequence=False).",
        )

    def _check_experts(self, op: Op, runs: OpShares, whole: Run, tolerance: float) -> None:
        """Compare with what devices compute that share out the experts of the op's layer; of equal ops one.

        Raises:
            WorkloadError: it differs.
        """
        split = self._split_of(op)
        if split is None or split.experts is None or op.kind in self._kinds:
            return
        self._kinds.add(op.kind)
        dims = {name: dim for name, dim in split.dims.items() if name not in split.words}
        split = replace(split, dims=dims, words=frozenset(), experts=split.experts.joined())
        why = self._differs(runs, split, whole, tolerance)
        if why is not None:
            raise WorkloadError(
                f"{place_of(op)}where {split.degree} devices have a part of its experts each, {why}",
                hint="Its experts take [samples, experts, ...] and give that, or take it out of tp_plans.",
            )

    def _differs(self, runs: OpShares, split: LayerSplit, whole: Run, tolerance: float) -> str | None:
        try:
            differences = [largest_difference(whole, run) for run in runs.in_parts(split, self._samples)]
        except Exception as error:  # what workers would run into
            return f"it fails: {first_line(error)}"
        what, relative = max(differences, key=lambda difference: difference[1])
        return f"{what} differs from that of the whole by {relative:.1e}" if relative > tolerance else None

    def _run(self, op: Op, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Run an op whole; gives its outputs."""
        self._require_room(op)
        values = Values.of_op(self._task, op, dtype)
        if self._writes_unknown(op):
            with values.held() as parameters, watching(self._task.root), constants_in(dtype):
                runs = OpShares(self._task, op, inputs, values, parameters)
                self._seen_backward.add(op.index)
                try:
                    outputs = runs.whole(self._samples).outputs
                except Exception as error:  # it may have no gradient in these numbers
                    self._refuse_array(op, error)
                else:
                    self._refuse_written(op, runs.written_backward)
                    return {} if op.is_loss else outputs
        arguments = [inputs[name].clone() for name in op.fields]
        # An op may ask for gradients itself, by what it is given too.
        arguments += [
            inputs[name].clone().requires_grad_(self._task.values[name].requires_grad) for name in op.inputs
        ]
        with values.held(), watching(self._task.root), constants_in(dtype), NoRandomness():
            try:
                outputs = self._task.op_module(op)(*arguments)
            except Exception as error:
                raise _DoesNotRunError(f"{place_of(op)}fails by itself: {first_line(error)}") from error
        return {} if op.is_loss else {n: v.detach() for n, v in zip(op.outputs, outputs, strict=True)}

    def _require_room(self, op: Op) -> None:
        parameters = sum(self._task.root.get_parameter(name).numel() for name in op.parameters)
        specs = [self._task.fields[name] for name in op.fields]
        specs += [self._task.values[name] for name in (*op.inputs, *op.outputs) if name in self._task.values]
        self._limits.require_room(parameters, sum(self._elements(spec, self._samples) for spec in specs))

    def _elements(self, spec: ValueSpec, samples: int) -> int:
        whole = spec.num_bytes // spec.dtype.itemsize
        if spec.batch_dim is None:
            return whole
        return whole // self._task.task.batch_size * samples

    def _compare_with_forward(self) -> str | None:
        """None: the ops together give what `forward` gives; else why that is not known."""
        if isinstance(self._task.task, FlowTask):
            return None
        try:
            return self._compare_on(self._batch)
        except NotCheckedError as error:
            return str(error)
        except WorkloadError:
            if not self._task.decided or self._samples == self._task.task.batch_size:
                raise
        # It decides by the size of the batch, and may do other things for so few samples.
        batch = first_batch(self._task, self._seed, self._task.task.batch_size)
        try:
            return self._compare_on(batch)
        except NotCheckedError as error:
            return f"it decides by the size of the batch ({self._task.decided[0]}), and {error}"

    def _compare_on(self, batch: Mapping[str, Tensor]) -> str | None:
        self._limits.require_time()
        samples = len(next(iter(batch.values())))
        parameters = sum(parameter.numel() for parameter in self._task.root.parameters())
        values = sum(self._elements(spec, samples) for spec in self._task.values.values())
        self._limits.require_room(parameters, values)
        values_held = Values.of_task(self._task, torch.float64)
        with constants_in(torch.float64):
            return compare_with_forward(self._task, _in_dtype(batch, torch.float64), values_held)

    def _result(self, findings: _Findings, forward_unchecked: str | None) -> TaskCheck:
        def by_name(reasons: Mapping[int, str]) -> dict[str, str]:
            return {self._names[op]: reasons[op] for op in sorted(reasons, reverse=True)}

        whole = by_name(findings.whole)
        unchecked = {name: why for name, why in by_name(findings.unchecked).items() if name not in whole}
        checked = dict.fromkeys(self._names[op] for op in sorted(findings.checked))
        return TaskCheck(
            task=self._task.task.name,
            samples=self._samples,
            checked=tuple(name for name in checked if name not in {**whole, **unchecked}),
            largest_difference=findings.largest,
            whole=whole,
            unchecked=unchecked,
            forward_unchecked=forward_unchecked,
        )


def _in_either(check: Callable[[torch.dtype], None]) -> None:
    """Check in float64, and what does not run in that in float32 too.

    Raises:
        NotCheckedError: something runs in neither.
    """
    for dtype in (torch.float64, torch.float32):
        try:
            check(dtype)
        except _DoesNotRunError as error:
            if dtype is torch.float32:
                raise NotCheckedError(str(error)) from error
        else:
            return


class _DoesNotRunError(Exception):
    """An op fails on the whole batch, in these numbers and with these parameters."""


def place_of(op: Op) -> str:
    """'file:line: ' of the op in the user's code, or nothing."""
    return f"{op.place}: " if op.place else ""


def _in_dtype(batch: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype_in(value.dtype, dtype)) for name, value in batch.items()}


# Sizes of gradients: a hook may clip large ones, or leave out small ones.
_SCALES = (1e-8, 1.0, 1e6)
_TOLERANCE = 1e-4  # of the largest entry that it gives, for rounding in float32

_HINT = (
    "Clip by `clip_norm` or `clip_value` in the workload file, and set other steps for some parameters by "
    "`groups`; a hook that multiplies (a mask, say) is fine."
)


def try_hooks(task: TaskGraph) -> dict[str, str]:
    """Why hooks of trained parameters could not be tried, by the parameter's name.

    Raises:
        WorkloadError: one gives for a sum of gradients another than the sum of what it gives for each, waits
            for the accumulated gradient, or writes into what the task holds.
    """
    untried: dict[str, str] = {}
    for name, parameter in task.root.named_parameters():
        hooks: Any = parameter
        if parameter.requires_grad and hooks._post_accumulate_grad_hooks:
            raise WorkloadError(
                f"task {task.task.name!r}: the parameter {name!r} has a hook that is called when its "
                "gradient is accumulated, and each device would call it for what it has of it",
                hint=_HINT,
            )
        if parameter.requires_grad and hooks._backward_hooks:
            failure = _try_hooks_of(task, name, parameter, hooks._backward_hooks)
            if failure is not None:
                untried[name] = f"a hook on the gradient of {name!r} was not tried: {failure}"
    return untried


def _try_hooks_of(
    task: TaskGraph, name: str, parameter: nn.Parameter, hooks: Mapping[int, Callable[..., Any]]
) -> str | None:
    """Try the hooks on the gradient of one parameter; the kind of error that a hook has raised, None without
    one. Raises WorkloadError as `try_hooks` does.
    """
    writes = RefusingWrites(partial(_held_by, task.root), partial(_writes, task.task.name, name))
    before = [(what, held, held.detach().clone()) for what, held in _held_by(task.root)]
    try:
        with writes, watching(task.root) as left:
            is_additive = _is_additive(hooks, parameter)
    except Exception as error:  # the user's code, on parameters that may be on the meta device
        if writes.refused is not None:
            raise writes.refused from None
        if (names := handed_out().refused_by_array(error)) is not None:
            raise _writes(task.task.name, name, names, place_of_error(error)) from None
        return type(error).__name__
    refuse_read_of_backward(task, left.left)
    for what, held, value in before:  # also by an array of numpy's
        if not held.is_meta and not torch.equal(held, value):
            raise _writes(task.task.name, name, what, _place_of_first(hooks))
    if not is_additive:
        raise WorkloadError(
            f"task {task.task.name!r}: a hook on the gradient of the parameter {name!r} gives another "
            "result for a sum of gradients than the sum of its results, and devices call it for parts of "
            "the gradient",
            hint=_HINT,
        )
    return None


def _place_of_first(hooks: Mapping[int, Any]) -> str | None:
    """'file:line' of the first of some hooks that is a function."""
    codes = (getattr(hook, "__code__", None) for hook in hooks.values())
    return next((place_of_code(code.co_filename, code.co_firstlineno) for code in codes if code), None)


def _hooks_of(parameter: Any) -> bool:
    return bool(parameter._post_accumulate_grad_hooks or parameter._backward_hooks)


def _held_by(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"the parameter {name!r}", parameter) for name, parameter in root.named_parameters())
    yield from ((f"the buffer {name!r}", buffer) for name, buffer in root.named_buffers())


def _writes(task: str, hooked: str, written: str, place: str | None = None) -> WorkloadError:
    return refusal(
        task,
        f"a hook on the gradient of the parameter {hooked!r} writes into {written}: each device calls it for "
        "its parts of the gradient, on what it has",
        place or place_inside(),
        DECLARE,
    )


def _is_additive(hooks: Mapping[int, Callable[..., Any]], parameter: nn.Parameter) -> bool:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    first, second = (torch.randn(parameter.shape, dtype=dtype, generator=generator) for _ in range(2))
    return all(_adds_up(hooks.values(), first * scale, second * scale) for scale in _SCALES)


def _adds_up(hooks: Iterable[Callable[..., Any]], first: Tensor, second: Tensor) -> bool:
    hooked = [_hooked(hooks, gradient) for gradient in (first + second, first, second)]
    largest = max((float(gradient.abs().max()) for gradient in hooked if gradient.numel()), default=0.0)
    return torch.allclose(hooked[0], hooked[1] + hooked[2], rtol=0.0, atol=_TOLERANCE * largest)


def _hooked(hooks: Iterable[Callable[..., Any]], gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    with torch.no_grad():
        for hook in hooks:
            replaced = hook(gradient)
            gradient = gradient if replaced is None else replaced
    return gradient
