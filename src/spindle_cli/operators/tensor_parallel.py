"""How an op's layer is shared out by tensor parallelism: which parameters each device has a part of, where
activations are summed, and whose gradients are parts.

As in Megatron (Shoeybi et al., arXiv 1909.08053, section 3): a "colwise" linear map has its outputs split, a
"rowwise" one its inputs. Each pair of the two needs one sum of an activation in the forward pass, behind the
rowwise map, and one of its gradient in the backward pass, before the colwise one. What lies outside of such
pairs every device of the group computes alike. A layer whose code runs once more in its backward pass, as
with `torch.utils.checkpoint`, stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.analysis.tracing.behaviour import behaviour_of
from spindle_cli.analysis.without_data import Unread
from spindle_cli.errors import InputError, WorkloadError
from spindle_cli.operators.experts.find import NotByExpertsError, find_experts
from spindle_cli.operators.experts.region import SamplePart
from spindle_cli.operators.experts.types import ExpertSplit
from spindle_cli.operators.heads.vocabulary import VocabularyShard, VocabularySplit, find_vocabulary_split
from spindle_cli.operators.heads.vocabulary_part import VocabularyPart
from spindle_cli.operators.sequence.around import called_on_meta
from spindle_cli.operators.sequence.find import SplitParts, find_sequence
from spindle_cli.operators.sequence.recording import NotBySequenceError
from spindle_cli.operators.sequence.types import SequenceSplit
from spindle_cli.operators.tensor_group import SequencePart, TensorGroup
from spindle_cli.operators.tp_plans import Way, adapted, by_experts, experts_of, plan_of, unknown_ways
from spindle_cli.plan.types import Plan, Slice
from spindle_cli.workload.graph import Op, ParameterTable, TaskGraph, WorkloadGraph
from spindle_cli.workload.types import Workload

# Dimension of a linear map's [out, in] weight that is split.
_SPLIT_DIMS: Mapping[Way, int] = {"colwise": 0, "rowwise": 1}
_FEWEST_DEVICES = 2
# Numbers of heads as torch, Hugging Face and most other libraries call them, on a module or its config.
_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class LayerSplit:
    """An op's layer over `degree` devices. Names are those inside the task's module.

    Attributes:
        degree: number of devices.
        dims: by parameter, the dimension that is split.
        entered: colwise modules: the gradients of their inputs are summed over the devices.
        summed: rowwise modules: their outputs are summed over the devices.
        added_once: biases of rowwise modules: whole, and added by one device alone.
        partial: other parameters that all devices hold whole, but use for their own part of the layer: the
            gradient is the sum of what the devices find.
        words: parameters of the vocabulary that the op's head or embedding is over; they are in `dims` too.
        sequence: how the devices share out the sequence between the split parts, where they do.
        experts: how they share out samples and experts, where the layer is one with experts; nothing is
            entered or summed then.
    """

    degree: int
    dims: Mapping[str, int]
    entered: tuple[str, ...]
    summed: tuple[str, ...]
    added_once: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    sequence: SequenceSplit | None = None
    experts: ExpertSplit | None = None

    @property
    def is_handed_on(self) -> bool:
        """Whether the op hands on a part of what it gives, to an op that is split alike."""
        by_positions = self.sequence is not None and self.sequence.kept
        return bool(by_positions or (self.experts is not None and self.experts.kept))

    def with_whole_ends(self) -> LayerSplit:
        """This split of an op that takes and gives all positions and samples."""
        return replace(self, sequence=None, experts=self.experts and self.experts.joined())

    def parts_taken(self, group: TensorGroup) -> dict[int, SequencePart]:
        """The part that a device of the group has of each of the op's arguments that may be a `Shared`."""
        if self.experts is not None:
            return {place: SamplePart(self.degree, dim, group) for place, dim in self.experts.taken.items()}
        if self.sequence is None or self.sequence.taken is None:
            return {}
        return {self.sequence.taken: SequencePart(self.degree, self.sequence.dim, group)}

    def vocabulary_shard(self, group: TensorGroup) -> VocabularyShard | None:
        """What a device of the group has of the vocabulary; None: the op's is not split."""
        return VocabularyShard(self.words, VocabularyPart(self.degree, group)) if self.words else None

    def finds_own_gradient(self, name: str) -> bool:
        """Whether what a device finds of a parameter's gradient is no other's: it is to be summed."""
        return name in self.dims or name in self.partial or self._is_of_positions(name)

    def _is_of_positions(self, name: str) -> bool:
        return self.sequence is not None and name in self.sequence.partial

    def local(self, name: str, tensor: Tensor) -> Tensor:
        """An empty tensor like one device's part of parameter `name`, the largest where they differ; `tensor`
        if all have all of it.
        """
        if name not in self.dims:
            return tensor
        shape = list(tensor.shape)
        shape[self.dims[name]] = -(-shape[self.dims[name]] // self.degree)
        return torch.empty(shape, dtype=tensor.dtype)


def layer_split(workload: Workload, task: TaskGraph, op: Op, degree: int) -> LayerSplit | None:
    """How the op is split `degree` ways: its layer by its class's plan, and its vocabulary; None if it has
    neither, or not so many heads, channels or words, if hooks on gradients would see parts of them, or if it
    asks for gradients itself, as the sums between its parts are differentiated once alone.

    Raises:
        WorkloadError: the plan names a submodule that is no linear map of the layer, or an unknown way.
    """
    if op.coupled or op.talks or _has_own_gradients(op) or runs_again(task, op):
        return None
    split = _any_split(workload, task, op, degree)
    if split is None or any(_has_hook(task.root.get_parameter(name)) for name in split.dims):
        return None
    return split


def _has_own_gradients(op: Op) -> bool:
    return op.asks_gradients or op.changes_gradients


def _has_hook(parameter: nn.Parameter) -> bool:
    """A hook is written for the whole gradient, and stays with the whole parameter."""
    hooks: object = parameter._backward_hooks
    return bool(hooks)


def _any_split(workload: Workload, task: TaskGraph, op: Op, degree: int) -> LayerSplit | None:
    layer = _by_plan(workload, task, op, degree)
    vocabulary = vocabulary_split(workload, task, op)
    names = vocabulary.names if vocabulary.fewest >= degree else frozenset()
    if not names:
        return layer
    layer = layer or LayerSplit(degree, {}, (), ())
    if names & layer.dims.keys():
        return layer
    return replace(layer, dims={**layer.dims, **dict.fromkeys(sorted(names), 0)}, words=names)


def vocabulary_split(workload: Workload, task: TaskGraph, op: Op) -> VocabularySplit:
    """What of an op can be cut by words, as far as the workload wants it."""
    smallest = workload.tp_vocabulary
    return VocabularySplit() if smallest is None else find_vocabulary_split(task, op, smallest)


def _by_plan(workload: Workload, task: TaskGraph, op: Op, degree: int) -> LayerSplit | None:
    """How the plan of an op's layer splits it; None: the layer has no plan, or it cannot be followed."""
    if op.target is None:
        return None
    layer = task.root.get_submodule(op.target)
    plan = plan_of(workload, layer)
    if not plan:
        return None
    if by_experts(plan):
        try:
            return _by_experts(task, op, plan, degree)
        except NotByExpertsError:
            return None
    split = _by_maps(op.target, layer, plan, degree) if _heads_divide(layer, degree) else None
    if split is None or not _used_once(task, op, split.dims):
        return None
    try:
        return replace(split, sequence=_by_sequence(workload, task, op, split))
    except NotBySequenceError:
        return split


def _by_maps(target: str, layer: nn.Module, plan: Mapping[str, Way], degree: int) -> LayerSplit | None:
    """How a plan splits a layer's linear maps; None: one of them has not as many channels for each device.

    Args:
        target: the layer's name in the task's module.
    """
    dims: dict[str, int] = {}
    added_once: set[str] = set()
    partial: set[str] = set()
    for path, way in plan.items():
        name, module = f"{target}.{path}", layer.get_submodule(path)
        if way == "partial":
            partial.update(f"{name}.{parameter}" for parameter, _ in module.named_parameters())
            continue
        assert isinstance(module, nn.Linear), "plan_of has seen to it"
        dim = _SPLIT_DIMS[way]
        if module.weight.shape[dim] % degree:
            return None
        dims[f"{name}.weight"] = dim
        if module.bias is not None and way == "colwise":
            dims[f"{name}.bias"] = 0
        elif module.bias is not None:
            added_once.add(f"{name}.bias")
    return LayerSplit(
        degree=degree,
        dims=dims,
        entered=tuple(f"{target}.{path}" for path, way in plan.items() if way == "colwise"),
        summed=tuple(f"{target}.{path}" for path, way in plan.items() if way == "rowwise"),
        added_once=frozenset(added_once),
        partial=frozenset(partial),
    )


def _by_experts(task: TaskGraph, op: Op, plan: Mapping[str, Way], degree: int) -> LayerSplit | None:
    """Raises NotByExpertsError: the devices cannot share out the layer's experts."""
    layer = task.root.get_submodule(str(op.target))
    counts = {path: experts_of(layer.get_submodule(path)) for path in plan}
    if min(counts.values()) < degree:
        return None
    dims = {
        f"{op.target}.{path}.{name}": 0
        for path in plan
        for name, _ in layer.get_submodule(path).named_parameters()
    }
    if not _used_once(task, op, dims):
        return None
    named = layer.named_parameters(prefix=str(op.target), remove_duplicate=False)
    return LayerSplit(
        degree=degree,
        dims=dims,
        entered=(),
        summed=(),
        partial=frozenset(name for name, _ in named) - dims.keys(),
        experts=find_experts(task, op, {f"{op.target}.{path}": count for path, count in counts.items()}),
    )


def _why_whole_experts(workload: Workload, task: TaskGraph, op: Op) -> str | None:
    """Why two devices do not share out a layer's experts; None: they do, or it has none."""
    plan = plan_of(workload, task.root.get_submodule(str(op.target)))
    if not plan or not by_experts(plan) or op.coupled or op.talks:
        return None
    try:
        _by_experts(task, op, plan, _FEWEST_DEVICES)
    except NotByExpertsError as error:
        return str(error)
    return None


def _by_sequence(workload: Workload, task: TaskGraph, op: Op, split: LayerSplit) -> SequenceSplit | None:
    """Raises NotBySequenceError: the devices cannot share out the layer's sequence."""
    if not workload.tp_sequence:
        return None
    cut = split.added_once | split.dims.keys()
    return find_sequence(task, op, SplitParts(cut, split.partial, split.entered, split.summed), split.degree)


def _why_whole_sequence(workload: Workload, task: TaskGraph, op: Op) -> str | None:
    """Why two devices do not share out a layer's sequence; None: they do, or do not split the layer."""
    split = layer_split(replace(workload, tp_sequence=False), task, op, _FEWEST_DEVICES)
    if split is None or not split.summed:
        return None
    try:
        _by_sequence(workload, task, op, split)
    except NotBySequenceError as error:
        return str(error)
    return None


def _heads_divide(layer: nn.Module, degree: int) -> bool:
    """Whether every attention of the layer that says so has a multiple of `degree` heads."""
    owners = [owner for module in layer.modules() for owner in (module, getattr(module, "config", None))]
    counts = [getattr(owner, name, None) for owner in owners for name in _HEADS]
    return all(count % degree == 0 for count in counts if isinstance(count, int))


def _used_once(task: TaskGraph, op: Op, dims: Mapping[str, int]) -> bool:
    """Whether the op uses what is split in its layer alone, and there under the split names alone."""
    split = {id(task.root.get_parameter(name)) for name in dims}
    for node in op.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        owner, _, last = str(node.target).rpartition(".")
        held = getattr(task.root.get_submodule(owner), last)
        if id(held) in split:
            return False
        if isinstance(held, nn.Module):
            for name, parameter in held.named_parameters(prefix=str(node.target), remove_duplicate=False):
                if id(parameter) in split and (node.target != op.target or name not in dims):
                    return False
    return True


def _why_whole_op(op: Op, kind: str) -> str | None:
    """Say what an op whose layer is of a class `kind` does that cannot be split; None: nothing."""
    reasons = (
        (op.coupled, f"the samples of {kind} depend on each other"),
        (op.batch_norms, f"the shares of {kind} sum the statistics of its batch norms"),
        (op.contrasts, f"the shares of {kind} gather what it compares"),
        (op.asks_gradients, f"{kind} asks for gradients itself"),
        (op.changes_gradients, f"{kind} has hooks on gradients, or a backward pass of its own"),
    )
    return next((why for holds, why in reasons if holds), None)


def describe_ways(workload: Workload, task: TaskGraph, op: Op) -> str:
    """For people: why an op cannot be split, or only by other degrees."""
    if op.target is None:
        return "it holds no layer, and no vocabulary that can be split"
    layer = task.root.get_submodule(op.target)
    kind = type(layer).__name__
    if (why := _why_whole_op(op, kind)) is not None:
        return why
    if runs_again(task, op):
        return f"{kind} runs once more in its backward pass (torch.utils.checkpoint)"
    try:
        plan = plan_of(workload, layer)
    except WorkloadError as error:
        return error.message
    unknown = unknown_ways(workload, layer)
    if unknown:
        listed = ", ".join(f"{path}: {way}" for path, way in unknown.items())
        return f"the plan of {kind} says what is not supported: {listed}"
    if not plan and (with_adapters := adapted(workload, layer)):
        return f"{kind} has adapters on {', '.join(with_adapters)}, and what they adapt is not split"
    if not plan:
        return f"{kind} has no plan in tp_plans, or none that splits anything"
    if by_experts(plan):
        why = _why_whole_experts(workload, task, op)
        return (
            f"the experts of {kind} are not shared out: {why}"
            if why
            else f"{kind} has fewer experts, or they are used elsewhere too"
        )
    return f"the heads or channels of {kind} do not divide by it, or its parameters are used elsewhere too"


def kept_whole(graph: WorkloadGraph) -> tuple[str, ...]:
    """For people: classes of layers that have a plan which cannot be followed, heads over many words that
    cannot be split, and why.
    """
    lines: dict[str, None] = {}
    for metaop in graph.metaops:
        task = graph.tasks[metaop.task]
        op = task.ops[metaop.ops[0]]
        if op.target is None:
            continue
        layer = task.root.get_submodule(op.target)
        has_parts = plan_of(graph.workload, layer) or vocabulary_split(graph.workload, task, op).names
        can_be_split = has_parts and not op.coupled and not op.talks
        is_whole = can_be_split and (_has_own_gradients(op) or runs_again(task, op))
        if is_whole or unknown_ways(graph.workload, layer) or adapted(graph.workload, layer):
            lines.setdefault(f"tensor parallelism: {describe_ways(graph.workload, task, op)}; it stays whole")
        elif why := _why_whole_experts(graph.workload, task, op):
            kind = type(layer).__name__
            lines.setdefault(
                f"tensor parallelism: the experts of {kind} are not shared out: {why}; it stays whole"
            )
        elif why := _why_whole_sequence(graph.workload, task, op):
            kind = type(layer).__name__
            lines.setdefault(f"tensor parallelism: each device has the whole sequence in {kind}: {why}")
    for name, task in graph.tasks.items():
        for why in vocabulary_split(graph.workload, task, task.ops[-1]).why_not:
            lines.setdefault(f"tensor parallelism: {name}: the head {why}; it stays whole")
    return tuple(lines)


def runs_again(task: TaskGraph, op: Op) -> bool:
    """Whether some part of an op's layer with parameters does: it would run without the parts of parameters,
    and the sums around them, that a device has in the forward pass alone.
    """
    if op.target is None:
        return False
    layer = task.root.get_submodule(op.target)
    key = "runs again", behaviour_of(layer)
    if key not in task.findings:
        task.findings[key] = _runs_again(task, op, layer)
    return bool(task.findings[key])


def _runs_again(task: TaskGraph, op: Op, layer: nn.Module) -> bool:
    ran_again = False

    def called(*_: Any) -> None:
        nonlocal ran_again
        # With `use_reentrant=True` the first pass has no gradients, else hooks for what it saves.
        saving = torch._C._autograd._top_saved_tensors_default_hooks(False)
        ran_again = ran_again or saving is not None or not torch.is_grad_enabled()

    holders = [module for module in layer.modules() if module._parameters]
    try:
        with called_on_meta(task, op) as (args, kwargs), Unread():
            hooks = [module.register_forward_pre_hook(called) for module in holders]
            try:
                layer(*args, **kwargs)
            finally:
                for hook in hooks:
                    hook.remove()
    except NotBySequenceError:
        return False
    except Exception:  # the user's code, which may not do without data
        return ran_again
    return ran_again


@dataclass(frozen=True)
class PlanSplits:
    """The splits of all ops of slices with tp > 1: by index in `plan.every_slice` and op of the MetaOp."""

    by_op: Mapping[tuple[int, int], LayerSplit]

    def split_names(self, plan: Plan) -> dict[tuple[str, int], frozenset[str]]:
        """(MetaOp, op of it) -> the dotted names of its parameters that some slice splits."""
        names: dict[tuple[str, int], frozenset[str]] = {}
        for (index, position), split in self.by_op.items():
            key = (plan.every_slice[index].metaop, position)
            names[key] = names.get(key, frozenset()) | frozenset(split.dims)
        return names

    def split_parameters(self, plan: Plan, graph: WorkloadGraph, table: ParameterTable) -> frozenset[str]:
        """Canonical names of all parameters that some slice splits."""
        return frozenset(
            table.names[graph.by_name[metaop].task, dotted]
            for (metaop, _), names in self.split_names(plan).items()
            for dotted in names
        )


def plan_splits(plan: Plan, graph: WorkloadGraph, where: str, *, only_evaluated: bool = False) -> PlanSplits:
    """How every slice's ops are split.

    Args:
        where: the plan's file, for messages.
        only_evaluated: ops without a layer, on devices whose trained ops have a vocabulary split, need have
            nothing to split: each device then computes all of them.

    Raises:
        InputError: the plan splits a layer that cannot be split so many ways.
        WorkloadError: a tensor-parallel plan does not fit its layer.
    """
    splits: dict[tuple[int, int], LayerSplit] = {}
    for index, slice_ in enumerate(plan.every_slice):
        if slice_.tp == 1:
            continue
        metaop = graph.by_name[slice_.metaop]
        task = graph.tasks[metaop.task]
        for position in range(*slice_.ops):
            op = task.ops[metaop.ops[position]]
            split = layer_split(graph.workload, task, op, slice_.tp)
            if split is None and only_evaluated and op.target is None:
                split = LayerSplit(slice_.tp, {}, (), ())
            if split is None:
                raise _refusal(where, slice_, graph, task, op)
            splits[index, position] = split
    return PlanSplits(splits)


def _refusal(where: str, slice_: Slice, graph: WorkloadGraph, task: TaskGraph, op: Op) -> InputError:
    return InputError(
        f"{where}: {slice_.label} is split {slice_.tp} ways by tensor parallelism, but its layers cannot be: "
        f"{describe_ways(graph.workload, task, op)}",
        hint="Give the layer's class a plan in Workload.tp_plans, or plan from a profile without tp > 1.",
    )
