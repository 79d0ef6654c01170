"""A traced workload: operators, the values between them, and the MetaOps they contract into; its parameters
and buffers, and what is done to these beside the optimizer's update.

An `Op` is one operator with the glue around it, as a small `fx.GraphModule`-ready graph; a *value* is a
tensor that one op hands to another. Everything here but the graphs themselves is plain data.

Every distinct parameter and buffer has one canonical name, the user's own (`ParameterTable`): dotted, from
the module that the names of a task's parameters start from. Bounds, and averages that move with others, name
them so; a `Move` has the names of its task's module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.refuse import COMPILE_OPERATORS
from spindle_cli.workload.types import FlowTask, Moment, Task

if TYPE_CHECKING:
    from spindle_cli.workload.settings.types import TaskLengths
    from spindle_cli.workload.types import Workload


# The hint of refusals of what changes parameters in other ways.
DECLARE = (
    "Declare it in the workload instead, to be done by whoever holds the parameters: "
    "follows=[Follows(teacher, student, decay)] for a moving average, with a function of the step for a "
    "decay that changes, and 'before_forward' where forward begins with it; constraints=[Constraint("
    "parameter, clamp=(low, high))] for bounds, with unit_norm=dim for vectors of length 1, behind every "
    "update (where forward begins with it, let the model be built within them)."
)


@dataclass(frozen=True)
class Move:
    """What a forward makes of a parameter at its start: `slow` becomes `decay` times itself and the rest of
    `fast`, both dotted names in its task's module. `place`: in the user's code.
    """

    slow: str
    fast: str
    decay: float
    place: str | None


@dataclass(frozen=True)
class Constrained:
    """A trained parameter, by canonical name, that is changed after every update. See `Constraint`."""

    name: str
    clamp: tuple[float | None, float | None] | None
    unit_norm: int | None

    @property
    def treats_elements_alone(self) -> bool:
        """Whether a part of the parameter can be treated without the rest."""
        return self.unit_norm is None

    def apply(self, values: Tensor) -> None:
        """Change values of the parameter: of all of it, or where elements are treated alone, of any."""
        if self.clamp is not None:
            values.clamp_(*self.clamp)
        else:
            assert self.unit_norm is not None, "a constraint says one of them"
            values.copy_(nn.functional.normalize(values, dim=self.unit_norm))


@dataclass(frozen=True)
class Following:
    """Parameters that are moving averages of trained ones. See `Follows`.

    Attributes:
        pairs: canonical names, of the average and of what it follows.
        decay: by the step, counted from 0.
        forwards_of: the task whose forward makes them by itself, at its start: once for each of its batches,
            of which a step may have several; None: they are declared.
    """

    pairs: tuple[tuple[str, str], ...]
    decay: float | Callable[[int], float]
    when: Moment
    forwards_of: str | None = None

    def decay_at(self, step: int) -> float:
        """Return the decay in a step, counted from 0.

        Raises:
            WorkloadError: the workload's function gives no number from 0 to 1.
        """
        decay = self.decay(step) if callable(self.decay) else self.decay
        number = decay.item() if isinstance(decay, Tensor) and decay.numel() == 1 else decay
        if not isinstance(number, int | float) or not 0 <= number <= 1:
            raise WorkloadError(
                f"follows: decay gave {decay!r:.80} for step {step}, expected a number from 0 to 1"
            )
        return float(number)


def move_towards(slow: list[Tensor], fast: list[Tensor], decay: float) -> None:
    """Give moving averages their next values, in place: `slow.mul_(decay).add_(fast, alpha=1 - decay)`."""
    if slow:  # torch takes no empty lists
        torch._foreach_mul_(slow, decay)
        torch._foreach_add_(slow, fast, alpha=1 - decay)


@dataclass(frozen=True)
class ValueSpec:
    """A tensor between two ops, for the task's whole batch.

    Attributes:
        name: unique within its task (the fx node's name).
        shape, dtype: for the whole batch.
        batch_dim: the dimension that the batch is split over, or None for a value without one (then its
            producer is never split, or each of its shares has a copy).
        rows_per_sample: size of that dimension over the batch size (2 if two rows belong to each sample).
        requires_grad: whether it has a graph behind it. A gradient need not come back all the same
            (`Op.gradients`).
        row: of a field that is taken as the same in every sample, since its values are read: a sample's
            entries, in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None
    rows_per_sample: int
    requires_grad: bool
    row: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes for the whole batch."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def shape_of(self, samples: int) -> tuple[int, ...]:
        """Shape of the part for so many samples; the whole shape without a batch dimension."""
        if self.batch_dim is None:
            return self.shape
        rows = samples * self.rows_per_sample
        return (*self.shape[: self.batch_dim], rows, *self.shape[self.batch_dim + 1 :])


IGNORED_LABEL = -100  # torch's default of ignore_index
# How torch.fx begins the names of tensors that forward has made of numbers while it was traced.
CONSTANT = "_tensor_constant"


@dataclass(frozen=True)
class LossShares:
    """A loss as the sum of what its shares compute.

    Attributes:
        graph: placeholders are the op's fields and inputs, then the share of the samples (a number), then the
            `num_counts` counts; the output is the share's part of the loss.
        all_must_count: fields with labels of a mean inside an operator, of which shares know nothing: none
            may be ignored (-100) where the batch is split.
        counts: placeholders are the fields `count_fields`, then the share of the samples; the output is the
            tuple of what the share counts. None where the loss needs no counts.
    """

    graph: fx.Graph
    counts: fx.Graph | None = None
    count_fields: tuple[str, ...] = ()
    num_counts: int = 0
    all_must_count: tuple[str, ...] = ()


@dataclass(frozen=True)
class Op:
    """One operator of one task, with its neighbouring glue.

    Attributes:
        index: position in its task's execution order.
        kind: what makes two ops equal: the layer class and the structure of the glue.
        target: dotted name of the operator module inside the task's module, or None for glue of its own (a
            loss).
        graph: placeholders are `fields` then `inputs`, in order; the output is the tuple of `outputs`
            (for the task's last op: the scalar loss alone).
        fields: names of the batch fields it reads.
        inputs: names of the values it consumes; `outputs`: of those it hands on.
        parameters, buffers: dotted names inside the task's module of all it uses, glue included.
        layer_parameters: of `parameters`, those of the operator module itself.
        coupled: its samples depend on each other; it is never split over the batch.
        coupled_because: why, where the workload does not list it itself.
        shares: of the task's last op, and of no other: what shares of the loss compute; where it is whole,
            what one of the several batches of a step has of it.
        batch_norms: dotted names inside the task's module of the batch norms whose statistics are summed over
            the op's shares, each once.
        results: keys of forward's dict that it gives, in an evaluation: its graph then gives them behind its
            outputs, and a loss's graph behind the loss.
        contrasts: it compares every sample with every other; its shares gather what they compare.
        changes: of `parameters` and `buffers`, those that its forward was seen to change.
        reads: of `buffers`, those whose values from before go into what it gives.
        followed: of `parameters`, those that it does not compute with: what others of them are moving
            averages of, so that its devices can move these, or averages that nothing computes with.
        gradients: of `inputs`, those that it gives a gradient for in a backward pass.
        asks_gradients: its forward asks autograd for gradients itself.
        changes_gradients: hooks, or backward passes of users' own, have a part in its backward pass.
        sees_gradients: `gradients` is what autograd has said, of an op that runs on tensors without values
            and has its own gradients from such ops; else those that may come, and each step shows which do.
        draws_own: it draws from a `torch.Generator` that somebody holds; in the run from its stream.
        kept: what its forward leaves for the next batch where no checkpoint has it, in attributes, objects,
            classes and files; by names from the task's module.
        left: what its forward leaves for whoever looks, named alike, whether the next one does or not.
    """

    index: int
    kind: str
    target: str | None
    graph: fx.Graph
    fields: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    layer_parameters: tuple[str, ...]
    coupled: bool
    is_loss: bool
    coupled_because: str | None = None
    shares: LossShares | None = None
    batch_norms: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    contrasts: bool = False
    changes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    followed: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    asks_gradients: bool = False
    changes_gradients: bool = False
    sees_gradients: bool = True
    draws_own: bool = False
    kept: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def computed_with(self) -> tuple[str, ...]:
        """The parameters that the op's forward uses."""
        return tuple(name for name in self.parameters if name not in self.followed)

    @property
    def place(self) -> str | None:
        """'file:line' of it in the user's code."""
        nodes = [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]
        calls = [node for node in nodes if node.op == "call_module" and node.target == self.target]
        places = [node.meta.get("place") for node in calls or nodes]
        return next((place for place in reversed(places) if place), None)

    @property
    def talks(self) -> bool:
        """Whether its shares sum or gather something inside of its passes."""
        return bool(self.batch_norms) or self.contrasts

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """All graphs of the op."""
        if self.shares is None:
            return (self.graph,)
        counts = () if self.shares.counts is None else (self.shares.counts,)
        return (self.graph, self.shares.graph, *counts)


@dataclass(frozen=True)
class TaskGraph:
    """One traced task.

    Attributes:
        root: the module that all dotted names are relative to.
        fields: specs of the batch's fields.
        loss_inside: an operator that gives a loss itself, if the last one does; by its dotted name.
        opened: operators that were traced into, as the losses in them can then be split; by dotted name.
        decided: places where forward decides by the size of the batch, as the whole batch has it.
        moves: moving averages of parameters that forward makes at its start, once for every batch.
        modes: by dotted name, of modules that forward puts into training or eval mode, the mode in which it
            calls them.
        results: specs of what forward returns in its dict beside the loss, where they are kept; `left_out`:
            the keys of what has no row for each sample.
        varying: fields whose samples have other sizes in other batches, and along which of their dimensions;
            all shapes here are those of one length.
        left_out_of_items: names of texts and other objects of the dataset's items that forward does not take.
        findings: what was found out about its layers, by all that it depends on; equal ones are asked once.
    """

    task: Task | FlowTask
    root: torch.nn.Module
    ops: tuple[Op, ...]
    values: dict[str, ValueSpec]
    fields: dict[str, ValueSpec]
    loss_inside: str | None = None
    opened: tuple[str, ...] = ()
    decided: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    modes: Mapping[str, bool] = field(default_factory=dict)
    results: dict[str, ValueSpec] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    varying: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    left_out_of_items: tuple[str, ...] = ()
    findings: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def producer(self) -> dict[str, int]:
        """Index of the op that produces each value."""
        return {value: op.index for op in self.ops for value in op.outputs}

    @property
    def loss_shares(self) -> LossShares:
        """How the loss is computed by shares."""
        shares = self.ops[-1].shares
        assert shares is not None, "the last op holds the loss"
        return shares

    def specs_of(self, op: Op) -> list[ValueSpec]:
        """Return what an op is given: its fields, then its inputs."""
        return [*(self.fields[name] for name in op.fields), *(self.values[name] for name in op.inputs)]

    @torch.no_grad()
    def move_as_forward(self) -> None:
        """Do to the modules what forward does to parameters at its start, and the ops do not."""
        for move in self.moves:
            slow, fast = (self.root.get_parameter(name) for name in (move.slow, move.fast))
            move_towards([slow], [fast], move.decay)

    def op_module(self, op: Op) -> fx.GraphModule:
        """Return an op as a callable module over the task's own parameters (the same objects, not copies).

        Call it with the batch fields named by `op.fields`, then the values named by `op.inputs`, in that
        order. It returns the tuple of the values named by `op.outputs`; the last op of a task returns the
        scalar loss instead.
        """
        return fx.GraphModule(self.root, op.graph)

    def share_module(self, op: Op) -> fx.GraphModule:
        """Return an op as a share of its batch computes it: `op_module`, but a loss that is known to be a sum
        or a mean over what counts takes two more kinds of arguments (`LossShares`), and gives the share's
        part of the loss.
        """
        return fx.GraphModule(self.root, op.graph if op.shares is None else op.shares.graph)

    @property
    def constants(self) -> dict[str, Tensor]:
        """The constants that the ops take, by name."""
        names = {str(node.target) for node in self._attributes() if str(node.target).startswith(CONSTANT)}
        return {name: value for name in names if isinstance(value := getattr(self.root, name), Tensor)}

    def hand_constants_on(self, root: nn.Module) -> tuple[str, ...]:
        """Let another build's root hold the constants, too, by names that nothing there has; the task's
        graphs use these from now on. Return the names.
        """
        renamed: dict[str, str] = {}
        for name, value in self.constants.items():
            renamed[name] = next(new for number in count() if not hasattr(root, new := f"{CONSTANT}{number}"))
            setattr(root, renamed[name], value)
        for node in self._attributes():
            node.target = renamed.get(str(node.target), node.target)
        return tuple(renamed.values())

    def _attributes(self) -> Iterator[fx.Node]:
        """Yield the nodes of all ops' graphs that take something that a module holds."""
        for op in self.ops:
            for graph in op.graphs:
                yield from (node for node in graph.nodes if node.op == "get_attr")


@dataclass(frozen=True)
class MetaOp:
    """A run of consecutive equal ops of one task, `ops` being their indices in the task's graph.

    `parameters` and `parameter_blocks` are the profile file's: same key and block, same parameters.
    """

    name: str
    task: str
    ops: tuple[int, ...]
    inputs: tuple[str, ...]
    inputs_of_every_op: tuple[str, ...]
    parameters: str | None
    parameter_blocks: tuple[int, ...] | None
    component: str
    coupled: bool


@dataclass(frozen=True)
class WorkloadGraph:
    """A workload with its traced tasks and its MetaGraph.

    Attributes:
        tasks: those that are trained.
        metaops: of them.
        fingerprint: identifies the MetaGraph and every shape in it.
        evaluations: where asked for, every task that has a dataset to be evaluated on, as it is evaluated:
            traced in eval mode. Those that are only evaluated have that dataset in place of their own.
        evaluated_metaops: of the tasks that are only evaluated.
        lengths: by task, of those whose batches have several shapes, with which they were traced.
        following: parameters that are moving averages of trained ones.
        constraints: what is done to trained parameters after every update.
    """

    workload: Workload
    tasks: dict[str, TaskGraph]
    metaops: tuple[MetaOp, ...]
    fingerprint: str
    evaluations: dict[str, TaskGraph] = field(default_factory=dict)
    evaluated_metaops: tuple[MetaOp, ...] = ()
    lengths: dict[str, TaskLengths] = field(default_factory=dict)
    following: tuple[Following, ...] = ()
    constraints: tuple[Constrained, ...] = ()

    def only_evaluated(self, name: str) -> WorkloadGraph:
        """Return the graph of one of the tasks that are only evaluated."""
        metaops = tuple(metaop for metaop in self.evaluated_metaops if metaop.task == name)
        return WorkloadGraph(self.workload, {name: self.evaluations[name]}, metaops, self.fingerprint)

    @cached_property
    def by_name(self) -> dict[str, MetaOp]:
        """MetaOps by name."""
        return {metaop.name: metaop for metaop in self.metaops}

    @cached_property
    def kept(self) -> tuple[str, ...]:
        """For people: what operators keep from batch to batch that no checkpoint has."""
        return tuple(
            f"task {name!r}: {op.target or 'its loss'} keeps {', '.join(op.kept)} from batch to batch, which "
            "no checkpoint has: a run that goes on begins with what the build has there. Where it matters, "
            "keep it in a buffer (register_buffer)"
            for name, task in self.tasks.items()
            for op in task.ops
            if op.kept
        )

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """For people: MetaOps that were found to be coupled although the workload does not list them, fields
        that are taken as the same in every sample, parameters that a forward moves, and what is left out of
        items.
        """
        coupled = (
            f"{metaop.name} is never split over the batch: {reason}"
            for metaop in self.metaops
            if (reason := self.tasks[metaop.task].ops[metaop.ops[0]].coupled_because) is not None
        )
        fixed = (
            f"task {name!r}: the values of field {spec.name!r} are read by forward, so it is taken as "
            f"{list(spec.row)} in every sample, which every step checks"
            for name, task in self.tasks.items()
            for spec in task.fields.values()
            if spec.row is not None
        )
        moved = (
            f"task {follows.forwards_of!r}: {len(follows.pairs)} parameters that forward moves at its "
            f"start ({follows.pairs[0][0]} towards {follows.pairs[0][1]}, say) are moved ahead of its "
            "batches by whoever holds them"
            for follows in self.following
            if follows.forwards_of is not None
        )
        drawing = (
            f"{metaop.name} draws from a torch.Generator of its own: in a run it draws from the run's random "
            "numbers, which are others in every share, and follow `seed`"
            for metaop in self.metaops
            if self.tasks[metaop.task].ops[metaop.ops[0]].draws_own
        )
        left_out = (
            f"task {name!r}: {', '.join(map(repr, task.left_out_of_items))} of the dataset's items: no "
            "tensors, and forward does not take them, so they are left out"
            for name, task in self.tasks.items()
            if task.left_out_of_items
        )
        names = ", ".join(self.workload.uncompiled)
        compiled = (f"torch.compile is left out of {names}: {COMPILE_OPERATORS}",) if names else ()
        return (*coupled, *fixed, *moved, *drawing, *left_out, *compiled, *self.kept)


def reached(first: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> dict[fx.Node, None]:
    """Return nodes of a graph and all that `onward` leads to from them."""
    reachable: dict[fx.Node, None] = {}
    pending = list(first)
    while pending:
        node = pending.pop()
        if node not in reachable:
            reachable[node] = None
            pending.extend(onward(node))
    return reachable


def made_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return nodes and all that they are made of."""
    return reached(nodes, lambda node: node.all_input_nodes)


@dataclass(frozen=True)
class ParameterTable:
    """Canonical names of parameters and buffers: '<first task that has it>.<dotted name in that task's
    module>'.

    Attributes:
        parameters, buffers: canonical name -> tensor, each distinct tensor once, in the workload's order.
        names: (task, dotted name) -> canonical name, for every name that a tensor has in any task.
        users: canonical name -> (task, op index) of every op that uses it, in order. A parameter of glue can
            belong to ops of several MetaOps: its gradient is the sum over all that are listed here.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    names: dict[tuple[str, str], str]
    users: dict[str, tuple[tuple[str, int], ...]]

    @classmethod
    def of(cls, graph: WorkloadGraph) -> ParameterTable:
        """Return the table of an analysed workload."""
        return cls.of_tasks(graph.tasks)

    @classmethod
    def of_tasks(cls, tasks: Mapping[str, TaskGraph]) -> ParameterTable:
        """Return the table of some traced tasks."""
        canonical: dict[int, str] = {}
        names: dict[tuple[str, str], str] = {}
        parameters: dict[str, nn.Parameter] = {}
        buffers: dict[str, Tensor] = {}
        for task, root in ((task.task.name, task.root) for task in tasks.values()):
            for name, tensor in _named_tensors(root):
                first_name = canonical.setdefault(id(tensor), f"{task}.{name}")
                names[task, name] = first_name
                if isinstance(tensor, nn.Parameter):
                    parameters.setdefault(first_name, tensor)
                else:
                    buffers.setdefault(first_name, tensor)
        users: dict[str, list[tuple[str, int]]] = {name: [] for name in (*parameters, *buffers)}
        for task_name, task_graph in tasks.items():
            for op in task_graph.ops:
                for name in (*op.parameters, *op.buffers):
                    users[names[task_name, name]].append((task_name, op.index))
        return cls(parameters, buffers, names, {name: tuple(used) for name, used in users.items()})

    @property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Canonical name -> the other names of the same tensor; of those that have others."""
        aliases: dict[str, dict[str, None]] = {}
        for (task, dotted), canonical in self.names.items():
            if (name := f"{task}.{dotted}") != canonical:
                aliases.setdefault(canonical, {})[name] = None
        return {canonical: tuple(names) for canonical, names in aliases.items()}

    def of_op(self, task: str, names: tuple[str, ...]) -> tuple[str, ...]:
        """Canonical names for an op's `parameters` or `buffers`."""
        return tuple(self.names[task, name] for name in names)

    def is_trainable(self, name: str) -> bool:
        """Whether a parameter takes a gradient."""
        return self.parameters[name].requires_grad

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer."""
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    def num_bytes(self, name: str) -> int:
        """Bytes of a parameter or buffer."""
        tensor = self.tensor(name)
        return tensor.numel() * tensor.element_size()


def _named_tensors(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)


def root_of(task: Task | FlowTask) -> nn.Module:
    """Return a task's module; for a `FlowTask`, one that holds all of its modules."""
    if isinstance(task, Task):
        return task.module
    root = nn.Module()
    for module, name in flow_modules(task).items():
        root.add_module(name, module)
    return root


def flow_modules(task: FlowTask) -> dict[nn.Module, str]:
    """Each module once, in the order in which the flows name them: 'vision', 'vision_2', ..."""
    names: dict[nn.Module, str] = {}
    for flow in task.flows:
        for end in (flow.producer, flow.consumer):
            if isinstance(end, nn.Module) and end not in names:
                base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(end).__name__).lower()
                taken = sum(
                    name == base or re.fullmatch(rf"{base}_\d+", name) is not None for name in names.values()
                )
                names[end] = base if taken == 0 else f"{base}_{taken + 1}"
    return names
