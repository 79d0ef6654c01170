"""A rank's ops as callables over the leaves that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from spindle_cli.analysis.at_lengths import is_same_graph, module_over
from spindle_cli.analysis.own_draws import draw_from_the_run
from spindle_cli.errors import InputError
from spindle_cli.operators.batch_dependent import over_shares, pairs_over_shares
from spindle_cli.operators.heads.chunked import loss_in_chunks
from spindle_cli.operators.heads.vocabulary import VocabularyShard, used_by_words, with_edits
from spindle_cli.operators.split_op import PartialOp, View, region_of
from spindle_cli.operators.tensor_group import TensorGroup
from spindle_cli.operators.tensor_parallel import LayerSplit, PlanSplits
from spindle_cli.operators.whole import LayerCompiler
from spindle_cli.runtime.communication.rows import Samples
from spindle_cli.runtime.communication.wiring import WiredSlice
from spindle_cli.runtime.part.own_ranges import leaf_without_memory
from spindle_cli.runtime.part.shards import Cut, Cuts, take_parts
from spindle_cli.runtime.step.compute import LocalSlice
from spindle_cli.training.precision import convert_module, dtype_in
from spindle_cli.workload.building.attributes import swapped_tensors
from spindle_cli.workload.building.memory import swap
from spindle_cli.workload.file import LossChunks
from spindle_cli.workload.graph import Op, ParameterTable, TaskGraph
from spindle_cli.workload.initial.types import OwnValues


@dataclass(frozen=True)
class Place:
    """How a rank's ops are built: which rank, on which device, with which floating-point dtype (None: that of
    the workload), by what their layers are compiled, if at all, and in how many chunks losses are computed.
    """

    rank: int
    device: torch.device
    dtype: torch.dtype | None
    compiler: LayerCompiler | None = None
    loss_chunks: LossChunks = 1


class LocalOps:
    """Builds one rank's slices, with each part of a parameter that they need held once."""

    def __init__(
        self,
        table: ParameterTable,
        cuts: Cuts,
        splits: PlanSplits,
        wired: Iterable[WiredSlice],
        place: Place,
        shards: Mapping[int, Sequence[OwnValues]] | None = None,
    ) -> None:
        """`wired`: the slices that the rank runs. Takes the parameters of the workload apart where they are
        cut. `shards`: by id, what there is of parameters that are shared out.
        """
        self._table = table
        self._cuts = cuts
        self._splits = splits
        self._place = place
        self._wired = tuple(wired)
        self._groups = {wired_slice.index: self._group_of(wired_slice) for wired_slice in self._wired}
        self._names = {id(parameter): name for name, parameter in table.parameters.items()}
        self._shapes = {id(parameter): parameter.shape for parameter in table.parameters.values()}
        # Made while all parameters have their shapes.
        self._modules = {wired_slice.index: self._modules_of(wired_slice) for wired_slice in self._wired}
        self.shards: dict[str, OwnValues] = {}
        with self._compiled_by_jit():
            self.leaves = self._take_leaves({} if shards is None else shards)

    def slices(self) -> dict[int, LocalSlice]:
        """The rank's slices, by index."""
        return {wired.index: self._slice(wired, self._splits, trains=True) for wired in self._wired}

    def evaluated(self, wired: WiredSlice, splits: PlanSplits | None = None) -> LocalSlice:
        """A slice as it is evaluated, over the same leaves: nothing is compiled, and no batch norm sums
        anything. `splits`: of its plan; None: of the plan that is trained by.
        """
        return self._slice(wired, self._splits if splits is None else splits, trains=False)

    @property
    def device(self) -> torch.device:
        """The device that all lies on that the rank holds."""
        return self._place.device

    def at_length(
        self,
        planned: LocalSlice,
        wired: WiredSlice,
        abstract: TaskGraph,
        constants: Mapping[str, torch.Tensor],
    ) -> LocalSlice:
        """A slice as it is for batches of another length, over the same leaves; nothing is compiled.

        Args:
            planned: the slice at the planned length.
            wired: the same slice at the other one.
            abstract: its task there, over modules of another build, without parameters.
            constants: tensors that the task's forward has made there, on the device.
        """
        runnable, modules = [], []
        for number, (position, op) in enumerate(zip(range(*wired.slice.ops), wired.ops, strict=True)):
            before, module = planned.wired.ops[number], planned.modules[number]
            shard = self._vocabulary_shard(wired, position, planned.group)
            is_whole = shard is None and not op.is_loss and not op.contrasts
            if is_whole and is_same_graph(before.graph, op.graph):
                runnable.append(planned.runnable[number])
                modules.append(module)
                continue
            graph = self._graph_at_length(abstract, op, planned.samples, shard)
            made = _as_in_a_run(op, module_over(graph, constants, module, wired.task.root))
            modules.append(made)
            split = self._splits.by_op.get((wired.index, position))
            # Of what is around the layer, nothing is known at this length.
            split = split and split.with_whole_ends()
            runnable.append(
                self._runnable(wired, op, made, split, planned.group, planned.shares, compiles=False)
            )
        return replace(planned, wired=wired, runnable=tuple(runnable), modules=tuple(modules))

    def _graph_at_length(
        self, abstract: TaskGraph, op: Op, samples: Samples, shard: VocabularyShard | None
    ) -> fx.Graph:
        setting = self._place.loss_chunks
        if shard is None and (setting == 1 or not op.is_loss):
            return op.graph if op.shares is None else op.shares.graph
        # What runs in chunks, or by words, is given all tensors that it holds.
        return loss_in_chunks(abstract, op, samples[1] - samples[0], setting, shard).module.graph

    def _group_of(self, wired: WiredSlice) -> TensorGroup | None:
        """The devices that hold the same share of a slice."""
        rank, layout = self._place.rank, wired.layout
        if wired.slice.tp == 1:
            return None
        return TensorGroup(layout.holders(layout.share_of[rank]), layout.member_of(rank), self._place.device)

    def _modules_of(self, wired: WiredSlice) -> tuple[fx.GraphModule, ...]:
        first, last = wired.layout.rows_of(self._place.rank)
        setting, group = self._place.loss_chunks, self._groups[wired.index]
        return tuple(
            _as_in_a_run(
                op,
                loss_in_chunks(
                    wired.task, op, last - first, setting, self._vocabulary_shard(wired, position, group)
                ).module,
            )
            for position, op in zip(range(*wired.slice.ops), wired.ops, strict=True)
        )

    def _evaluated_module(
        self, wired: WiredSlice, op: Op, split: LayerSplit | None, group: TensorGroup | None
    ) -> tuple[fx.GraphModule, LayerSplit | None]:
        """An op of an evaluation, with no loss in chunks; whatever training has cut by words, it takes by
        words.
        """
        module = _as_in_a_run(op, wired.task.share_module(op))
        if split is None or group is None:
            return module, split
        cuts = {
            dotted: self._cuts.by_name[self._names[id(parameter)]]
            for dotted, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in self._names
        }
        split = split.with_whole_ends()  # nothing is kept
        first, last = wired.layout.rows_of(self._place.rank)
        with swapped_tensors(module, self._as_uncut()):
            words = frozenset(
                dotted
                for dotted in used_by_words(module)
                if dotted not in split.dims or dotted in split.words
                if dotted in cuts and cuts[dotted].is_by_words(split.degree)
            )
            split_by_words = replace(split, words=words)
            shard = split_by_words.vocabulary_shard(group)
            if shard is None:
                return module, split_by_words
            edits = shard.edits_for_evaluation(wired.task, op, module, last - first)
        dims = {name: dim for name, dim in split.dims.items() if name not in split.words}
        split = replace(split, dims={**dims, **dict.fromkeys(words, 0)}, words=words)
        return with_edits(module, edits), split

    def _as_uncut(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """What a tensor was before it was taken apart, without data."""
        originals: dict[int, torch.Tensor] = {}

        def as_uncut(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in originals:
                shape = self._shapes.get(id(tensor), tensor.shape)
                empty = torch.empty(shape, dtype=tensor.dtype, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                originals[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            return originals[id(tensor)]

        return as_uncut

    def _vocabulary_shard(
        self, wired: WiredSlice, position: int, group: TensorGroup | None
    ) -> VocabularyShard | None:
        split = self._splits.by_op.get((wired.index, position))
        return None if split is None or group is None else split.vocabulary_shard(group)

    @contextmanager
    def _compiled_by_jit(self) -> Iterator[None]:
        """Let modules that torch.jit has compiled have their parameters again at the end: they hold what the
        tensors were, and see nothing of an exchange.
        """
        parts = [part for modules in self._modules.values() for op in modules for part in op.modules()]
        compiled = [part for part in parts if isinstance(part, torch.jit.ScriptModule)]
        held = [(part, dict(part._parameters.items())) for part in compiled]
        yield
        for part, parameters in held:
            for name, parameter in parameters.items():
                part._parameters[name] = parameter

    def _take_leaves(self, shards: Mapping[int, Sequence[OwnValues]]) -> dict[str, nn.Parameter]:
        """Every leaf of this rank, on its device, in the workload's order; of those that are shared out
        nothing but what the rank has of them.
        """
        held: dict[str, set[int]] = {}
        for wired in self._wired:
            for position, op in zip(range(*wired.slice.ops), wired.ops, strict=True):
                split = self._splits.by_op.get((wired.index, position))
                for dotted in op.parameters:
                    name = self._table.names[wired.task.task.name, dotted]
                    held.setdefault(name, set()).update(self._parts(wired, name, dotted, split))
        leaves: dict[str, nn.Parameter] = {}
        for name, parameter in self._table.parameters.items():
            if name in held and id(parameter) in shards:
                leaves.update(self._take_own(parameter, shards[id(parameter)]))
            elif name in held:
                leaves.update(take_parts(parameter, self._cuts.by_name[name], held[name]))
        for leaf in leaves.values():
            leaf.data = leaf.data.to(self._place.device, dtype_in(leaf.dtype, self._place.dtype))
        return leaves

    def _take_own(
        self, parameter: nn.Parameter, shards: Sequence[OwnValues]
    ) -> Iterator[tuple[str, nn.Parameter]]:
        is_cut = shards[0].part.ranges is not None
        for shard in shards:
            values = shard.values.to(self._place.device, dtype_in(shard.values.dtype, self._place.dtype))
            if shard.part.elements is None:
                yield shard.part.key, nn.Parameter(values, requires_grad=parameter.requires_grad)
            else:
                self.shards[shard.part.key] = replace(shard, values=values)
                yield shard.part.key, leaf_without_memory(parameter, shard.part, values)
        if is_cut:  # the parameter itself is used by nobody
            swap(parameter, nn.Parameter(torch.empty(0, dtype=parameter.dtype), parameter.requires_grad))

    def _parts(self, wired: WiredSlice, name: str, dotted: str, split: LayerSplit | None) -> range:
        """The parts of a parameter that this rank uses for an op."""
        cut = self._cuts.by_name[name]
        if split is None or dotted not in split.dims:
            return range(cut.count)
        return cut.of_member(wired.layout.member_of(self._place.rank), split.degree)

    def _slice(self, wired: WiredSlice, splits: PlanSplits, *, trains: bool) -> LocalSlice:
        rank, device = self._place.rank, self._place.device
        shares = _shares(wired, rank, device) if trains else None
        group = self._groups[wired.index] if trains else self._group_of(wired)
        of_ops = [splits.by_op.get((wired.index, position)) for position in range(*wired.slice.ops)]
        modules = self._modules.get(wired.index, ())
        if not trains:
            made = [
                self._evaluated_module(wired, op, split, group)
                for op, split in zip(wired.ops, of_ops, strict=True)
            ]
            modules, of_ops = tuple(module for module, _ in made), [split for _, split in made]
        for module in modules:
            convert_module(module, device, self._place.dtype)
        runnable = tuple(
            self._runnable(wired, op, module, split, group, shares, trains=trains, compiles=trains)
            for op, module, split in zip(wired.ops, modules, of_ops, strict=True)
        )
        return LocalSlice(wired, runnable, modules, wired.layout.rows_of(rank), group, shares)

    def _runnable(
        self,
        wired: WiredSlice,
        op: Op,
        module: fx.GraphModule,
        split: LayerSplit | None,
        group: TensorGroup | None,
        shares: TensorGroup | None,
        *,
        trains: bool = True,
        compiles: bool = True,
    ) -> nn.Module:
        """The op's module, over views of leaves where it does not use whole parameters of this rank's own;
        else compiled, if that is asked for and nothing is summed inside of it.
        """
        first = group is None or group.member == 0
        views: dict[str, View] = {}
        distinct: dict[tuple[str, bool, bool, int], View] = {}
        for dotted, parameter in module.named_parameters(remove_duplicate=False):
            name = self._names.get(id(parameter))
            if name is None:  # of a task that is only evaluated
                continue
            cut = self._cuts.by_name[name]
            is_own = split is not None and split.finds_own_gradient(dotted)
            is_zero = not first and split is not None and dotted in split.added_once
            if cut.count == 1 and (first or is_own or not (parameter.requires_grad or is_zero)):
                continue
            leaves = self._leaves(wired, cut, self._parts(wired, name, dotted, split))
            view = View(leaves, cut.dim, counts=first or is_own, is_zero=is_zero)
            views[dotted] = distinct.setdefault((name, view.counts, is_zero, len(leaves)), view)
        if split is None or group is None:
            if not trains:
                return PartialOp(module, views, None) if views else module
            summing = over_shares(self._contrasting(wired, op, module, shares, views), module, shares)
            compiler = self._place.compiler if compiles else None
            if views or compiler is None or summing is not module or op.asks_gradients or op.draws_own:
                return summing
            return compiler.compile_layer(module, op.target)
        return PartialOp(module, views, region_of(module, split, group))

    def _leaves(self, wired: WiredSlice, cut: Cut, parts: range) -> tuple[nn.Parameter, ...]:
        """The leaves of a parameter's parts.

        Raises:
            InputError: an evaluation takes more of it than training has put on this rank.
        """
        missing = [part for part in parts if cut.key(part) not in self.leaves]
        if missing:
            raise InputError(
                f"{wired.slice.label}: its evaluation takes all of {cut.name}, of which training has put "
                f"{cut.count - len(missing)} of {cut.count} parts on rank {self._place.rank}",
                hint="Use it in the evaluation as in training, or plan without tensor parallelism there.",
            )
        return tuple(self.leaves[cut.key(part)] for part in parts)

    def _contrasting(
        self,
        wired: WiredSlice,
        op: Op,
        module: fx.GraphModule,
        shares: TensorGroup | None,
        views: dict[str, View],
    ) -> nn.Module:
        """The op over views of leaves; a contrastive loss gathers what it compares from all shares."""
        layout = wired.layout
        cuts = (0, *(layout.rows(share)[1] for share in range(layout.dp)))
        gathering = pairs_over_shares(module, wired.task, op, shares, cuts)
        if not views:
            return gathering
        renamed = views if gathering is module else {f"op.{name}": view for name, view in views.items()}
        return PartialOp(gathering, renamed, None)


def _as_in_a_run(op: Op, module: fx.GraphModule) -> fx.GraphModule:
    """An op's module, with all its random numbers from the run."""
    if op.draws_own:
        draw_from_the_run(module)
    return module


def _shares(wired: WiredSlice, rank: int, device: torch.device) -> TensorGroup | None:
    """The devices that run a share each, where the ops of a slice sum something over them."""
    layout = wired.layout
    if layout.sums_shares:
        return TensorGroup(layout.devices, layout.share_of[rank], device)
    if layout.dp > 1 and any(op.talks for op in wired.ops):
        return _UnplannedGroup(layout.devices, layout.share_of[rank], device, label=wired.slice.label)
    return None


@dataclass
class _UnplannedGroup(TensorGroup):
    """Devices that the plan has no communicator for, as it does not say that they sum anything."""

    label: str = ""

    def sum_(self, tensor: torch.Tensor, *, is_gradient: bool) -> None:  # noqa: ARG002 - whatever it is
        """Refuse.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{self.label}: its batch norms sum {tensor.numel()} numbers over its devices, of which the plan "
            f"says nothing (batch_sums of {self.label.partition('[')[0]} is empty)",
            hint=_AGAIN,
        )

    def gather(self, values: torch.Tensor, per_share: Sequence[int]) -> torch.Tensor:  # noqa: ARG002 - see `sum_`
        """Refuse.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{self.label}: its loss compares {sum(per_share)} samples of all its devices, of which the plan "
            f"says nothing (batch_sums of {self.label.partition('[')[0]} is empty)",
            hint=_AGAIN,
        )


_AGAIN = "Profile the workload again, and plan again from that."
