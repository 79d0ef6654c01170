"""One op on its whole batch against the same op on shares of it, cut and counted as workers do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from spindle_cli.analysis.losses.counts import LossCounter, share_of_samples
from spindle_cli.analysis.own_draws import Drawn, FromTheRun
from spindle_cli.operators.batch_dependent import over_shares, pairs_over_shares
from spindle_cli.operators.heads.chunked import loss_in_chunks
from spindle_cli.operators.split_op import PartialOp, View, region_of
from spindle_cli.operators.tensor_parallel import LayerSplit
from spindle_cli.profile.checking.in_turn import InTurn
from spindle_cli.profile.checking.values import Values
from spindle_cli.training.precision import NoRandomness
from spindle_cli.workload.graph import Op, TaskGraph, ValueSpec
from spindle_cli.workload.refuse import sparse_gradient

# By the coarsest numbers that an op computes in: above what rounding does, below what a wrong rule does.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
# A gradient that is zero but for rounding is compared by this share of the op's largest.
_SMALLEST_SHARE = 1e-3


@dataclass(frozen=True)
class Run:
    """What an op has given: outputs, the gradients of its inputs and parameters, and its buffers."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @property
    def is_finite(self) -> bool:
        """Whether no output and no gradient is not a number."""
        return not any(t.isnan().any() for t in (*self.outputs.values(), *self.gradients.values()))


class OpShares:
    """Runs one op whole and in shares on the same inputs."""

    def __init__(
        self,
        task: TaskGraph,
        op: Op,
        inputs: Mapping[str, Tensor],
        values: Values,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """`inputs`: by name, the batch's fields and the op's values for all samples. `parameters`: those in
        place.
        """
        self._task = task
        self._op = op
        self._inputs = {name: inputs[name] for name in (*op.fields, *op.inputs)}
        self._specs = {**{n: task.fields[n] for n in op.fields}, **{n: task.values[n] for n in op.inputs}}
        self._values = values
        self._held = parameters
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._module = task.op_module(op)
        self._share_module = task.share_module(op)
        self._given = inputs
        self._cotangents: dict[str, Tensor] = {}
        self.watch = Watch()  # of the whole batch
        self.written_backward: tuple[str, ...] = ()  # parameters, as `whole` has seen
        self._draws = False  # whether the op draws anything, as `whole` has seen

    def whole(self, samples: int) -> Run:
        """Runs the op forward and backward on all samples."""
        self._values.start_anew()
        with NoRandomness() as chance, self.watch:
            run, leaves = self._forward(self._module, 0, samples)
        self._draws = chance.replaced
        generator = torch.Generator().manual_seed(0)
        self._cotangents = {
            name: torch.randn(output.shape, generator=generator, dtype=output.dtype)
            for name, output in run.outputs.items()
            if output.requires_grad and not self._op.is_loss
        }
        before = {name: parameter.detach().clone() for name, parameter in self._held.items()}
        result = self._backward(run, leaves, self._cotangents, 1.0)
        self.written_backward = tuple(
            name
            for name, parameter in self._held.items()
            if name not in self._op.changes and not torch.equal(parameter, before[name])
        )
        return result

    def in_shares(self, cuts: Sequence[int]) -> Run:
        """On shares that end at `cuts`, joined; after `whole`. Buffers are those of the last share. What
        the shares sum and gather is summed and gathered here, as workers do together.
        """
        group = InTurn(len(cuts) - 1)
        module = over_shares(self._share_module, self._share_module, group)
        module = pairs_over_shares(module, self._task, self._op, group, cuts)
        counts = self._counts(cuts)
        spans = list(pairwise(cuts))
        forward = group.run([partial(self._share_forward, module, *span, cuts[-1], counts) for span in spans])
        is_part = counts is not None or self._task.task.reduction == "sum"
        passes = zip(spans, forward, strict=True)
        runs = group.run(
            [
                partial(
                    self._backward,
                    run,
                    leaves,
                    self._seeds(first, last),
                    1.0 if is_part else (last - first) / cuts[-1],
                )
                for (first, last), (run, leaves) in passes
            ]
        )
        return Run(
            {name: self._joined(name, [run.outputs[name] for run in runs]) for name in runs[0].outputs},
            {
                name: self._joined(name, [run.gradients[name] for run in runs], is_gradient=True)
                for name in runs[0].gradients
            },
            runs[-1].buffers,
        )

    def draws_again(self, samples: int) -> bool:
        """Whether it draws the same numbers where torch's generator is at another place, as it is on the
        devices of the other shares; after `whole`.
        """
        if not self._draws:
            return False
        drawn: list[list[Tensor]] = []
        states: dict[int, tuple[torch.Generator, Tensor]] = {}
        for seed in (0, 1):
            self._values.start_anew()
            with torch.random.fork_rng(devices=[]), Drawn(states) as draws:
                torch.default_generator.manual_seed(seed)
                with FromTheRun() if self._op.draws_own else nullcontext():
                    self._forward(self._module, 0, samples)
            drawn.append(draws.tensors)
        return any(torch.equal(*pair) for pair in zip(*drawn, strict=False) if pair[0].shape == pair[1].shape)

    def in_words(self, split: LayerSplit, samples: int) -> list[Run]:
        """On all samples, by each device of those that share out the op's vocabulary; after `whole`. Of its
        parameters' gradients each run has those of all words.
        """
        group = InTurn(split.degree)
        vocabulary = split.vocabulary_shard(group)
        module = loss_in_chunks(self._task, self._op, samples, 1, vocabulary).module
        counts = self._counts((0, samples))
        more = () if counts is None else (1.0, *counts)
        parts = [self._words_of(module, split, member) for member in range(split.degree)]
        passes = group.run([partial(self._part_forward, part, samples, more) for part in parts])
        runs = group.run(
            [
                partial(self._backward, run, leaves, self._cotangents, 1.0, self._wanted(part))
                for part, (run, leaves) in zip(parts, passes, strict=True)
            ]
        )
        cut = {name for part in parts for name in part.by_name}
        joined = {
            name: torch.cat([run.gradients[name] for run in runs])
            for name in runs[0].gradients
            if name in cut
        }
        return [replace(run, gradients={**run.gradients, **joined}) for run in runs]

    def in_parts(self, split: LayerSplit, samples: int) -> list[Run]:
        """On all samples, by each device of those that share out the op's layer; after `whole`. Of its
        parameters' gradients each run has those that the devices' come to together.
        """
        group = InTurn(split.degree)
        parts = [self._part_of(split, group, member) for member in range(split.degree)]
        passes = group.run([partial(self._part_forward, part, samples, ()) for part, _ in parts])
        runs = group.run(
            [
                partial(self._backward, run, leaves, self._cotangents, 1.0, wanted)
                for (_, wanted), (run, leaves) in zip(parts, passes, strict=True)
            ]
        )
        together = {
            name: torch.cat([run.gradients[name] for run in runs], split.dims[name])
            if name in split.dims
            else torch.stack([run.gradients[name] for run in runs]).sum(0)
            for name in runs[0].gradients
            if name in self._parameters
        }
        return [replace(run, gradients={**run.gradients, **together}) for run in runs]

    def _part_of(
        self, split: LayerSplit, group: InTurn, member: int
    ) -> tuple[PartialOp, dict[str, nn.Parameter]]:
        """Return a device's part of the op, with leaves of its own where it has parts; and what it finds
        gradients of.
        """
        views: dict[str, View] = {}
        view_by_use: dict[tuple[int, bool, bool], View] = {}
        wanted: dict[str, nn.Parameter] = {}
        for name, whole in self._module.named_parameters(remove_duplicate=False):
            first, is_own = member == 0, split.finds_own_gradient(name)
            leaf = whole
            if name in split.dims:
                dim = split.dims[name]
                begin, end = (whole.shape[dim] * (member + end) // split.degree for end in (0, 1))
                leaf = nn.Parameter(
                    whole.detach().narrow(dim, begin, end - begin).clone(), whole.requires_grad
                )
            is_zero = not first and name in split.added_once
            view = View((leaf,), counts=first or is_own, is_zero=is_zero)
            views[name] = view_by_use.setdefault((id(whole), view.counts, is_zero), view)
            if name in self._parameters:  # where it does not count it comes to nothing, by the same sums
                wanted[name] = views[name].leaves[0]
        return PartialOp(self._module, views, region_of(self._module, split, group)), wanted

    def _words_of(self, module: fx.GraphModule, split: LayerSplit, member: int) -> PartialOp:
        """Return a device's part of the op, with leaves of its own."""
        views: dict[str, View] = {}
        view_by_id: dict[int, View] = {}
        for name, whole in module.named_parameters(remove_duplicate=False):
            if name in split.words:
                first, last = (len(whole) * (member + end) // split.degree for end in (0, 1))
                part = nn.Parameter(whole.detach()[first:last].clone(), whole.requires_grad)
                views[name] = view_by_id.setdefault(id(whole), View((part,)))
        return PartialOp(module, views, None)

    def _wanted(self, part: PartialOp) -> dict[str, nn.Parameter]:
        """The parameters whose gradients a device finds, by the names that the whole op has for them."""
        return {**self._parameters, **{n: leaf for n, leaf in part.by_name.items() if n in self._parameters}}

    def _part_forward(
        self, part: PartialOp, samples: int, more: Sequence[Any]
    ) -> tuple[Run, dict[str, Tensor]]:
        self._values.start_anew()
        with self._without_chance():
            return self._forward(part, 0, samples, more)

    def _share_forward(
        self, module: nn.Module, first: int, last: int, size: int, counts: Sequence[Tensor] | None
    ) -> tuple[Run, dict[str, Tensor]]:
        self._values.start_anew()
        more = () if counts is None else ((last - first) / size, *counts)
        with self._without_chance():
            return self._forward(module, first, last, more)

    def _without_chance(self) -> AbstractContextManager[object]:
        """Leave chance out inside, where the op draws, as `whole` has seen."""
        return NoRandomness() if self._draws else nullcontext()

    def _seeds(self, first: int, last: int) -> dict[str, Tensor]:
        """Return the gradients that the samples from `first` to `last` start from; for copies without a batch
        dimension, those of the first share alone.
        """
        seeds: dict[str, Tensor] = {}
        for name, seed in self._cotangents.items():
            spec = self._task.values[name]
            seeds[name] = _rows(seed, spec, first, last)
            if spec.batch_dim is None and first > 0:
                seeds[name] = torch.zeros_like(seed)
        return seeds

    def _counts(self, cuts: Sequence[int]) -> tuple[Tensor, ...] | None:
        """What the shares of a loss count together; None: it is not known to be a sum of their parts."""
        shares = self._op.shares
        if shares is None or shares.num_counts == 0:
            return None if shares is None else ()
        counter = LossCounter(self._task.root, shares)
        counted = torch.zeros(shares.num_counts, dtype=torch.float64)
        for first, last in pairwise(cuts):
            rows = {name: self._given[name][first:last] for name in counter.fields}
            counted += counter.count(rows, share_of_samples(last - first, cuts[-1], 1))
        return counted.unbind()

    def _forward(
        self, module: nn.Module, first: int, last: int, more: Sequence[Any] = ()
    ) -> tuple[Run, dict[str, Tensor]]:
        arguments: dict[str, Tensor] = {}
        for name, value in self._inputs.items():
            spec = self._specs[name]
            part = _rows(value, spec, first, last).detach().clone()
            arguments[name] = part.requires_grad_(spec.requires_grad and not _is_whole(part))
        result = module(*arguments.values(), *more)
        outputs = {"loss": result} if self._op.is_loss else dict(zip(self._op.outputs, result, strict=True))
        leaves = {name: argument for name, argument in arguments.items() if argument.requires_grad}
        return Run(outputs, {}, {}), leaves

    def _backward(
        self,
        run: Run,
        leaves: Mapping[str, Tensor],
        seeds: Mapping[str, Tensor],
        counts: float,
        parameters: Mapping[str, nn.Parameter] | None = None,
    ) -> Run:
        """`counts`: what a loss of these samples counts in that of all. `parameters`: those in place of the
        op's.
        """
        outputs = dict(run.outputs)
        if self._op.is_loss:
            outputs["loss"] = outputs["loss"] * counts
            seeds = {"loss": torch.ones_like(outputs["loss"])}
        wanted = {**leaves, **(self._parameters if parameters is None else parameters)}
        gradients: Sequence[Tensor | None] = [None] * len(wanted)
        if seeds and wanted:
            ends = [outputs[name] for name in seeds]
            with self._without_chance():  # a layer may run again in its backward pass
                gradients = torch.autograd.grad(
                    ends,
                    list(wanted.values()),
                    [seeds[name] for name in seeds],
                    allow_unused=True,
                    retain_graph=True,  # the pass may have to be run again, see InTurn
                )
        require_dense(self._task.task.name, wanted, gradients)
        gradient_by_name = {
            name: torch.zeros_like(tensor) if gradient is None else gradient
            for (name, tensor), gradient in zip(wanted.items(), gradients, strict=True)
        }
        buffers = {name: buffer.detach().clone() for name, buffer in self._values.buffers().items()}
        return Run({name: output.detach() for name, output in outputs.items()}, gradient_by_name, buffers)

    def _joined(self, name: str, parts: list[Tensor], *, is_gradient: bool = False) -> Tensor:
        spec = self._specs.get(name) if is_gradient else self._task.values.get(name)
        if spec is not None and spec.batch_dim is None and not is_gradient:
            # Every share has a copy: of them the one that is farthest from the first.
            return max(parts, key=lambda part: relative_difference(part, parts[0], 0.0))
        if spec is None or spec.batch_dim is None:  # a parameter's gradient, the loss
            return torch.stack(parts).sum(0)
        return torch.cat(parts, spec.batch_dim)


def require_dense(task: str, names: Iterable[str], gradients: Iterable[Tensor | None]) -> None:
    """Refuse gradients that have some rows of a parameter alone."""
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None and gradient.is_sparse:
            raise sparse_gradient(task, name)


def _rows(tensor: Tensor, spec: ValueSpec, first: int, last: int) -> Tensor:
    """The part of a value that belongs to samples [first, last); all of it without a batch dimension."""
    if spec.batch_dim is None:
        return tensor
    return tensor.narrow(spec.batch_dim, first * spec.rows_per_sample, (last - first) * spec.rows_per_sample)


def largest_difference(whole: Run, shares: Run) -> tuple[str, float]:
    """Return what differs most, and by how much of its largest element; infinite where shapes do."""
    scale = max((float(g.abs().max()) for g in whole.gradients.values() if g.numel()), default=0.0)
    differences: list[tuple[float, str]] = []
    kinds = (
        ("", whole.outputs, shares.outputs, 0.0),
        ("the gradient of ", whole.gradients, shares.gradients, scale * _SMALLEST_SHARE),
        ("what forward leaves in ", whole.buffers, shares.buffers, 0.0),
    )
    for kind, ours, theirs, smallest in kinds:
        differences += [
            (relative_difference(theirs[name], tensor, smallest), f"{kind}{name}")
            for name, tensor in ours.items()
        ]
    relative, what = max(differences, default=(0.0, "nothing"))
    return what, relative


def relative_difference(ours: Tensor, theirs: Tensor, smallest: float) -> float:
    """The largest difference over the largest element of `theirs`, or over `smallest` if that is more."""
    if ours.shape != theirs.shape:
        return float("inf")
    if ours.numel() == 0 or torch.equal(ours, theirs):
        return 0.0
    left, right = _wide(ours.detach()), _wide(theirs.detach())
    same = (left == right) | (left.isnan() & right.isnan())
    gap = float((left - right).abs().masked_fill(same, 0.0).nan_to_num(float("inf"), float("inf")).max())
    size = max(float(right.abs().nan_to_num(0.0, 0.0).max()), smallest)
    if gap == 0:
        return 0.0
    return gap / size if size > 0 else float("inf")


def _is_whole(tensor: Tensor) -> bool:
    """Whether it has whole numbers or booleans, to which no gradient comes."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    """Gives a tensor in float64, with complex numbers as pairs."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64)


def first_line(error: Exception) -> str:
    """Return what failed, in a line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class Watch(TorchDispatchMode):
    """Notes the coarsest floating-point numbers that are computed inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.bits = 64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and not _is_whole(tensor):
                self.bits = min(self.bits, torch.finfo(tensor.dtype).bits)
        return result

    @property
    def tolerance(self) -> float | None:
        """How far two results may differ; None where nothing can be told, in numbers of less than 32 bits."""
        return {64: TOLERANCE[torch.float64], 32: TOLERANCE[torch.float32]}.get(self.bits)
