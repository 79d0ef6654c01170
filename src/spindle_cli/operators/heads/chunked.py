"""A loss op whose widest part runs in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from spindle_cli.operators.heads.chunks import InChunks, Repeated
from spindle_cli.operators.heads.cuts import find_cuts
from spindle_cli.operators.heads.logits_walk import Edits
from spindle_cli.operators.heads.region import (
    NotInPartsError,
    Region,
    elements_of,
    find_region,
    holds_module,
    modules_in,
    widest_value,
)
from spindle_cli.operators.heads.vocabulary import VocabularyShard, copied, values_of, with_edits
from spindle_cli.workload.file import LossChunks
from spindle_cli.workload.graph import Op, TaskGraph, WorkloadGraph

# Elements of the widest value of a chunk that are never cut further: 64 MiB in float32.
_FEWEST_ELEMENTS = 2**24


@dataclass(frozen=True)
class LossInChunks:
    """How a share of a loss is computed.

    Attributes:
        module: the op as `share_module` gives it, its widest part in chunks where there are several.
        elements: of the widest value, for the whole share.
        count: how many chunks.
        why_whole: why it is computed in one go though it is wide enough; None: it is not, or is cut.
    """

    module: fx.GraphModule
    elements: int = 0
    count: int = 1
    why_whole: str | None = None


def loss_in_chunks(
    task: TaskGraph, op: Op, rows: int, setting: LossChunks, words: VocabularyShard | None = None
) -> LossInChunks:
    """An op as a share of `rows` samples computes it: of a loss, its widest part in chunks.

    Args:
        setting: of the workload. 'auto': chunks of no more elements than the parameters of the widest part
            have (so that adding up their gradients costs less time than making them), and of 64 MiB at least.
            A number: so many, as far as there are rows or positions.
        words: the shard of the vocabulary that the device has, where several devices split it.
    """
    module = task.share_module(op)
    can_be_cut = (
        op.is_loss
        and not op.coupled
        and op.shares is not None
        and not (op.talks or op.asks_gradients or op.changes_gradients)
    )
    narrow = "as narrow as any chunk", op.graph
    # A share of fewer rows has no wider values.
    is_narrow = setting == "auto" and rows <= task.findings.get(narrow, 0)
    if words is None and (setting == 1 or not can_be_cut or is_narrow):
        return LossInChunks(module)
    values = values_of(task, op, module, rows)
    edits, degree = ({}, 1) if words is None else (words.edits(module, values), words.part.degree)
    whole = LossInChunks(with_edits(module, edits))
    widest = widest_value(module.graph, values, op.target) if can_be_cut and setting != 1 else None
    if widest is None:
        return whole
    if widest[1] <= _FEWEST_ELEMENTS:
        task.findings[narrow] = max(rows, task.findings.get(narrow, 0))
    elements = -(-widest[1] // degree)
    if setting == "auto" and elements <= _FEWEST_ELEMENTS:
        return whole
    try:
        region = find_region(module.graph, values, op.target, module)
        limit = _limit(region, values, module, setting, degree)
        if limit >= elements:
            return replace(whole, elements=elements)
        cuts = find_cuts(
            region, _region_module(region, module, {}), values, values_of(task, op, module, 2 * rows)
        )
    except NotInPartsError as error:
        return replace(whole, elements=elements, why_whole=str(error))
    held = _held(region, module)
    in_chunks = InChunks(_region_module(region, module, edits), held, cuts, elements, limit)
    chunks = in_chunks.chunks([values[node] for node in region.inputs])
    if len(chunks) == 1:
        return replace(whole, elements=elements, why_whole="it has one row, which cannot be cut")
    return LossInChunks(_with_call(region, module, held, in_chunks, edits), elements, len(chunks))


@dataclass(frozen=True)
class TimedOp:
    """An op as it is run alone, for its time and memory.

    Attributes:
        module: takes the op's fields and inputs, and of a loss in chunks, or one that compares samples, what
            a share of it takes besides.
        num_counts: of these, the counts; None: it takes nothing else.
        loss_chunks: how many chunks.
    """

    module: fx.GraphModule
    num_counts: int | None = None
    loss_chunks: int = 1

    def more_arguments(self, device: torch.device) -> tuple[Any, ...]:
        """What a share takes besides, as if it were the whole batch with one label that counts."""
        if self.num_counts is None:
            return ()
        return (1.0, *torch.ones(self.num_counts, dtype=torch.float64, device=device).unbind())

    def called(self, module: nn.Module) -> nn.Module:
        """A module made from `module`, as one of the op's fields and inputs alone."""
        return module if self.num_counts is None else _AsWholeBatch(module, self)


class _AsWholeBatch(nn.Module):
    def __init__(self, module: nn.Module, op: TimedOp) -> None:
        super().__init__()
        self.module = module
        self._op = op

    def forward(self, *arguments: Tensor) -> Any:
        return self.module(*arguments, *self._op.more_arguments(arguments[0].device))


def timed_op(
    task: TaskGraph, op: Op, rows: int, setting: LossChunks, words: VocabularyShard | None = None
) -> TimedOp:
    """An op as a share of `rows` samples runs it, its loss in chunks where `setting` says so; with `words`:
    as one of the devices that split its vocabulary.
    """
    chunked = loss_in_chunks(task, op, rows, setting, words)
    if op.shares is None:
        return TimedOp(chunked.module)
    if chunked.count == 1 and words is None and not op.contrasts:
        return TimedOp(task.op_module(op))
    return TimedOp(chunked.module, op.shares.num_counts, chunked.count)


def whole_losses(graph: WorkloadGraph, setting: LossChunks) -> tuple[str, ...]:
    """For people: losses with values wide enough for chunks that are computed in one go, and why."""
    lines: list[str] = []
    for name, task in graph.tasks.items():
        chunked = loss_in_chunks(task, task.ops[-1], task.task.batch_size, setting)
        if chunked.why_whole is not None:
            lines.append(
                f"{name}: its loss is computed in one go, with {chunked.elements:,} elements of its widest "
                f"value for the whole batch: {chunked.why_whole}"
            )
    return tuple(lines)


@contextmanager
def values_only(module: nn.Module) -> Iterator[None]:
    """Run a module, inside of it ops with losses in chunks, that is run again before its backward pass."""
    with ExitStack() as stack:
        for part in _parts_in_chunks(module):
            stack.enter_context(part.values_only())
        yield


@contextmanager
def gradients_later(module: nn.Module) -> Iterator[None]:
    """Run a module as in float16, where losses in chunks take gradients in the backward pass."""
    with ExitStack() as stack:
        for part in _parts_in_chunks(module):
            stack.enter_context(part.gradients_later())
        yield


@contextmanager
def sampled(module: nn.Module, repeated: Repeated) -> Iterator[None]:
    """Run a module on tensors without data; see `InChunks.sampled`."""
    with ExitStack() as stack:
        for part in _parts_in_chunks(module):
            stack.enter_context(part.sampled(repeated))
        yield


def _parts_in_chunks(module: nn.Module) -> list[InChunks]:
    graphs = (part.graph for part in module.modules() if isinstance(part, fx.GraphModule))
    return [node.target for graph in graphs for node in graph.nodes if isinstance(node.target, InChunks)]


def _limit(
    region: Region, values: dict[fx.Node, Any], module: fx.GraphModule, setting: LossChunks, degree: int
) -> int:
    """Elements of the widest value that a chunk may have on one of `degree` devices."""
    if setting != "auto":
        return -(-region.widest[1] // (setting * degree))
    called = modules_in(_callers(region, module), module).values()
    parameters = {id(parameter): parameter for part in called for parameter in part.parameters()}
    given = [
        values[node] for node in region.inputs if node.op == "get_attr" and isinstance(values[node], Tensor)
    ]
    return max(_FEWEST_ELEMENTS, (elements_of(parameters.values()) + elements_of(given)) // degree)


def _region_module(region: Region, module: fx.GraphModule, edits: Edits) -> fx.GraphModule:
    """The region by itself, over the op's own modules; takes its inputs in order."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in region.inputs}
    for node in region.nodes:
        for source in node.all_input_nodes:
            if source not in copies and holds_module(source, module):
                copies[source] = graph.node_copy(source)
        copies[node] = copied(graph, node, copies, edits)
    graph.output(copies[region.exit])
    return fx.GraphModule(module, graph)


def _held(region: Region, module: fx.GraphModule) -> tuple[str, ...]:
    """The names of all parameters and buffers of the region's modules, tied ones by each of theirs."""
    held: dict[str, None] = {}
    for name, part in modules_in(_callers(region, module), module).items():
        for inside, _ in (
            *part.named_parameters(remove_duplicate=False),
            *part.named_buffers(remove_duplicate=False),
        ):
            held[f"{name}.{inside}"] = None
    return tuple(held)


def _callers(region: Region, module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that call modules, or hand them to a call."""
    sources = (source for node in region.nodes for source in node.all_input_nodes)
    return [*region.nodes, *(source for source in sources if holds_module(source, module))]


def _with_call(
    region: Region, module: fx.GraphModule, held: Sequence[str], in_chunks: InChunks, edits: Edits
) -> fx.GraphModule:
    """The op with one call in the place of the region: behind all else that does not take what it gives."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    late: list[fx.Node] = []
    behind = {region.exit}
    members = set(region.nodes)
    for node in module.graph.nodes:
        if node in members:
            continue
        if any(source in behind for source in node.all_input_nodes):
            behind.add(node)
            late.append(node)
        else:
            copies[node] = copied(graph, node, copies, edits)
    inputs = [copies[node] for node in region.inputs]
    copies[region.exit] = graph.call_function(in_chunks, (*inputs, *(graph.get_attr(name) for name in held)))
    for node in late:
        copies[node] = copied(graph, node, copies, edits)
    made = fx.GraphModule(module, graph)
    for name in held:
        owner, _, attribute = name.rpartition(".")
        if attribute in module.get_submodule(owner)._non_persistent_buffers_set:
            made.get_submodule(owner)._non_persistent_buffers_set.add(attribute)
    return made
