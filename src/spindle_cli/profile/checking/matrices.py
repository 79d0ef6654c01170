"""Which trained matrices' gradients may be gathered as what they are made of: rows of an embedding, or the
factors of a linear map; and for how many tokens.

Every op that uses a matrix is run on tensors without data, with the matrix's lookups and products cut off
from autograd as the runtime does it: then no gradient may come to the matrix any more, so that nothing else
uses it. How many tokens a share has is seen at two sizes of share.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional

from spindle_cli.analysis.without_data import Remembering, Unread
from spindle_cli.costs.parameters import MatrixGradient
from spindle_cli.operators.factors import Capturing
from spindle_cli.operators.heads.chunked import timed_op
from spindle_cli.operators.tensor_parallel import LayerSplit
from spindle_cli.profile.batch_sums import Matrix
from spindle_cli.profile.op.counting import OpTensors, with_state, with_tensors
from spindle_cli.profile.op.tensor_parallel import tensors_of
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import Op, ParameterTable, TaskGraph, WorkloadGraph

if TYPE_CHECKING:
    from torch import Tensor

Way = Literal["rows", "factors"]


@dataclass(frozen=True)
class Matrices:
    """The matrices of a workload whose gradients may be gathered: by (task, index of the op in it), those
    that it uses, with their dotted names in the task's module.
    """

    by_op: Mapping[tuple[str, int], Sequence[tuple[str, Matrix]]]

    @classmethod
    def find(cls, graph: WorkloadGraph, train: TrainSettings) -> Matrices:
        """Those that may gain by it: what is gathered is less than what a sum takes around, for as few tokens
        as all holders together have.

        None where layers are compiled, of tasks whose batches have several shapes, and of losses, which may
        be computed in chunks.
        """
        if train.compile:
            return cls({})
        table = ParameterTable.of(graph)
        uses = _all_uses(graph, table)
        cast = None if train.autocast is None else getattr(torch, train.autocast)
        by_op: dict[tuple[str, int], list[tuple[str, Matrix]]] = {}
        for name, of_name in uses.items():
            width = table.parameters[name].itemsize
            alike = _alike(name, of_name, width, width if cast is None else cast.itemsize)
            if _may_gain(alike, train.accumulate, train.widens_gradients):
                for (task, op, dotted, _), matrix in zip(of_name, alike, strict=True):
                    by_op.setdefault((task, op.index), []).append((dotted, matrix))
        return cls(by_op)

    @property
    def names(self) -> frozenset[str]:
        """The canonical names of the matrices."""
        return frozenset(matrix.parameter for of_op in self.by_op.values() for _, matrix in of_op)

    def of_ops(
        self, task: str, ops: Sequence[Op], split_of: Callable[[Op], LayerSplit | None]
    ) -> tuple[Matrix, ...]:
        """Return the matrices of a MetaOp's ops, counted from its first. `split_of`: how tensor parallelism
        splits an op.
        """
        matrices = []
        for position, op in enumerate(ops):
            split = split_of(op)
            for dotted, matrix in self.by_op.get((task, op.index), ()):
                is_split = split is not None and dotted in split.dims
                matrices.append(matrix.model_copy(update={"op": position, "is_split": is_split}))
        return tuple(matrices)


# A task, an op of it, a matrix's dotted name there, and how the op uses it: in one way alone, or None.
_UseOf = tuple[str, Op, str, "_Use | None"]


def _all_uses(graph: WorkloadGraph, table: ParameterTable) -> dict[str, list[_UseOf]]:
    """Return the uses of every trained matrix, by canonical name."""
    uses: dict[str, list[_UseOf]] = {
        name: []
        for name, parameter in table.parameters.items()
        if parameter.dim() == 2
        and parameter.requires_grad
        and parameter.is_floating_point()
        and not parameter._backward_hooks  # would see no gradient
    }
    seen = _Seen()
    for task_name, task in graph.tasks.items():
        for op in task.ops:
            matrix_names = [dotted for dotted in op.parameters if table.names[task_name, dotted] in uses]
            if matrix_names:
                use_by_name = {} if task_name in graph.lengths else seen.uses(task, op)
                for dotted in matrix_names:
                    uses[table.names[task_name, dotted]].append(
                        (task_name, op, dotted, use_by_name.get(dotted))
                    )
    return uses


def _alike(name: str, uses: Sequence[_UseOf], width: int, cast_width: int) -> list[Matrix]:
    """Return the uses of a matrix, if all are in one way."""
    known_uses = [(op, use) for _, op, _, use in uses if use is not None]
    if len(known_uses) < len(uses) or len({use.way for _, use in known_uses}) != 1:
        return []
    return [
        Matrix(
            op=op.index,
            parameter=name,
            way=use.way,
            outputs=use.outputs,
            inputs=use.inputs,
            num_bytes=use.outputs * use.inputs * width,
            factor_width=width if use.way == "rows" else cast_width,
            tokens=use.tokens,
            fixed_tokens=use.fixed_tokens,
        )
        for op, use in known_uses
    ]


def _may_gain(uses: Sequence[Matrix], batches: int, is_wide: bool) -> bool:
    """Whether less is gathered than a sum takes around, if every token is there once."""
    if not uses:
        return False
    first = uses[0]
    width = first.num_bytes // (first.outputs * first.inputs) * (2 if is_wide else 1)
    tokens = batches * sum(use.tokens + use.fixed_tokens for use in uses)
    gradient = MatrixGradient(first.outputs, first.inputs, tokens, width, first.factor_width)
    gathered = gradient.rows_bytes if first.way == "rows" else gradient.factors_bytes
    return gathered < 2 * gradient.dense_bytes


@dataclass(frozen=True)
class _Use:
    """How an op uses a matrix, and for how many tokens: of its whole batch, and besides in every pass."""

    way: Way
    outputs: int
    inputs: int
    tokens: int
    fixed_tokens: int


@dataclass(frozen=True)
class _Seen:
    """Runs ops; of equal ones the first alone."""

    uses_by_key: dict[Hashable, tuple[_Use | None, ...]] = field(default_factory=dict)

    def uses(self, task: TaskGraph, op: Op) -> dict[str, _Use]:
        """Return the matrices of an op that it uses in one way alone, by dotted name."""
        if op.is_loss or op.talks or op.asks_gradients:  # what its own gradients pass is no part of a sum
            return {}
        given = [task.fields[name] for name in op.fields] + [task.values[name] for name in op.inputs]
        shapes = tuple(
            (parameter.shape, parameter.dtype, parameter.requires_grad)
            for parameter in map(task.root.get_parameter, op.computed_with)
        )
        specs = tuple((spec.shape, spec.dtype, spec.batch_dim, spec.requires_grad) for spec in given)
        key = op.kind, shapes, specs, op.computed_with if op.target is None else None
        if key not in self.uses_by_key:
            self.uses_by_key[key] = tuple(_uses_of(task, op))
        return {
            dotted: use
            for dotted, use in zip(op.computed_with, self.uses_by_key[key], strict=True)
            if use is not None
        }


def _uses_of(task: TaskGraph, op: Op) -> Iterator[_Use | None]:
    """How an op uses each of its parameters, in their order; None where it is no matrix in one product."""
    samples = task.task.batch_size
    # A number of shares that divides the batch, as all that are profiled do.
    cuts = next((n for n in range(2, samples + 1) if samples % n == 0), 1)
    whole = _run(task, op, samples)
    part = whole if cuts == 1 or op.coupled else _run(task, op, samples // cuts)
    for dotted in op.computed_with:
        of_whole, of_part = whole.get(dotted), part.get(dotted)
        if of_whole is None or of_part is None or of_whole.way != of_part.way:
            yield None
            continue
        shape = task.root.get_parameter(dotted).shape
        # tokens = fixed + sample * samples, at both sizes
        more, less = of_whole.tokens, of_part.tokens
        in_samples = more if part is whole else (more - less) * cuts // (cuts - 1)
        if (
            (part is not whole and (more - less) * cuts % (cuts - 1))
            or in_samples % samples
            or in_samples > more
        ):
            yield None  # how many a share has does not follow from its samples
            continue
        yield _Use(of_whole.way, int(shape[0]), int(shape[1]), in_samples, more - in_samples)


@dataclass
class _Note:
    """Takes nothing but how many tokens there were; `is_mixed`: the matrix was used in both ways."""

    way: Way = "rows"
    tokens: int = 0
    is_mixed: bool = False

    def take_rows(self, ids: Tensor, rows: Tensor) -> None:  # noqa: ARG002 - how many is all that counts
        self._add("rows", ids.numel())

    def take_factors(self, outputs: Tensor, inputs: Tensor) -> None:  # noqa: ARG002 - as above
        self._add("factors", inputs.shape[0])

    def _add(self, way: Way, tokens: int) -> None:
        self.is_mixed |= self.tokens > 0 and self.way != way
        self.way = way
        self.tokens += tokens


class _Watching(Capturing):
    """Tells whether a matrix is used where the op's own code runs forward once more in its backward pass
    (`torch.utils.checkpoint`): nothing would be cut off from autograd then.
    """

    runs_again = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (functional.embedding, functional.linear):
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
            # With `use_reentrant=True` the first pass has no gradients, else hooks for what it saves.
            self.runs_again |= hooks is not None or not torch.is_grad_enabled()
        return super().__torch_function__(func, types, args, kwargs)


def _run(task: TaskGraph, op: Op, samples: int) -> dict[str, _Note]:
    """Return, by dotted name, what a share of so many samples brings to matrices that nothing else uses."""
    return with_tensors(task, op, samples, _notes)


def _notes(tensors: OpTensors) -> dict[str, _Note]:
    op, mode = tensors.op, tensors.mode
    module = timed_op(tensors.task, op, tensors.rows, 1, None).module
    with mode:
        state = tensors.state(module, None)
        inputs = tensors.inputs()
    if tensors.is_real or not state.keys() >= set(op.computed_with):
        return {}  # it decides by values what it uses, and how
    trained = {name: state[name] for name in op.computed_with if state[name].requires_grad}
    notes = {id(tensor): _Note() for tensor in trained.values()}
    with torch.random.fork_rng(devices=[]), mode, Remembering(), Unread(), torch.enable_grad():
        with _Watching(notes) as watching, with_state(module, state):
            result = tensors_of(module(*inputs))
        outputs = [
            output for output in (result if isinstance(result, tuple) else (result,)) if output.requires_grad
        ]
        if not outputs or watching.runs_again:
            return {}
        left = torch.autograd.grad(
            outputs,
            list(trained.values()),
            [torch.empty_like(output) for output in outputs],
            allow_unused=True,
        )
    return {
        name: note
        for (name, tensor), gradient in zip(trained.items(), left, strict=True)
        if gradient is None and (note := notes[id(tensor)]).tokens and not note.is_mixed
    }
