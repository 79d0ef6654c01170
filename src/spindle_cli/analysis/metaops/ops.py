"""From a traced forward to ops: one graph per operator, with the glue that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, fx, nn

from spindle_cli.analysis.fixed import add_checks
from spindle_cli.analysis.metaops.cut import Cutter
from spindle_cli.analysis.metaops.finding import Finder
from spindle_cli.analysis.metaops.glue import find_homes
from spindle_cli.analysis.metaops.sharing import AtHand
from spindle_cli.analysis.pairs.find import split_pairs
from spindle_cli.analysis.rules.batch_norms import statistics_of
from spindle_cli.analysis.splitting.coupling import Trace, hands_on_whole
from spindle_cli.analysis.splitting.samples import Samples
from spindle_cli.analysis.tracing.faithful import check_homes, check_in_place
from spindle_cli.analysis.tracing.observe import Observer
from spindle_cli.analysis.tracing.prepare import (
    NO_RESULTS,
    Results,
    ask_for_types,
    check_keys,
    check_memory,
    cut_gradients,
    drop_unused,
    find_loss,
    find_results,
    inline_constants,
    name_squeezed_dims,
    split_container,
    unused_in,
)
from spindle_cli.analysis.tracing.proxies.changes import Changes
from spindle_cli.analysis.tracing.proxies.rows import check_rows
from spindle_cli.analysis.tracing.shapes import Shapes
from spindle_cli.workload.graph import TaskGraph
from spindle_cli.workload.refuse import refusal
from spindle_cli.workload.types import FlowTask, Task, Workload

# Attributes of an fx.GraphModule that a module has not: nothing that it is made of may be called so.
_NAMES_OF_OPS = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph()))) - frozenset(dir(nn.Module()))


def make_ops(
    task: Task | FlowTask,
    root: nn.Module,
    graph: fx.Graph,
    samples: Mapping[str, Tensor],
    workload: Workload,
    finder: Finder,
    *,
    keeps_results: bool = False,
    trained: TaskGraph | None = None,
) -> TaskGraph:
    """Cut a task's trace into ops.

    Args:
        root: module that the trace's names are relative to.
        samples: a small collated batch, for the shapes of the fields.
        finder: of the whole workload.
        keeps_results: ops also give what forward returns beside the loss.
        trained: the task as it is trained: ops take what they have there; None: whatever they need.

    Raises:
        WorkloadError: no scalar loss, or an op that cannot run on the task's batch; with the place in the
            user's code.
    """
    _check_names(task, root, graph)
    check_in_place(task.name, root, graph)
    changes = Changes(graph)
    shapes = _prepare(task, root, graph, samples, finder.observer)
    results = find_results(graph, shapes) if keeps_results else NO_RESULTS
    loss = find_loss(task, graph, shapes, results)
    verdicts = finder.independence.verdicts
    if trained is None:
        _refuse_unused(task.name, root, graph, shapes, lambda: Samples(root, graph, shapes, verdicts))
    drop_unused(graph)
    for check in add_checks(graph, samples):
        shapes.values[check] = shapes.doubled[check] = None
    changes.check(task.name, root, loss, shapes, finder.observer)
    check_rows(task.name, graph)
    check_memory(task.name, graph, shapes)
    operators = _operators(task, root, graph, workload)
    for node in operators:
        split_container(graph, node, shapes)
        check_keys(task.name, node)
        node.meta["arguments"] = _argument_specs(node, shapes)
    samples_of = Samples(root, graph, shapes, verdicts)
    trace = Trace(task, root, graph, shapes, loss, finder.independence, samples_of, operators)
    return _cut(trace, workload, finder, results, trained)


def _prepare(
    task: Task | FlowTask,
    root: nn.Module,
    graph: fx.Graph,
    samples: Mapping[str, Tensor],
    observer: Observer,
) -> Shapes:
    """Bring a trace into the form that ops are cut from; gives what its values are."""
    shapes = observer.observe(task.name, root, graph, samples, task.batch_size)
    if cut_gradients(graph, shapes):
        shapes = observer.observe(task.name, root, graph, samples, task.batch_size)
    inline_constants(graph, shapes)
    name_squeezed_dims(graph, shapes)
    ask_for_types(graph, shapes)
    return shapes


def _cut(
    trace: Trace, workload: Workload, finder: Finder, results: Results, trained: TaskGraph | None
) -> TaskGraph:
    """The task's ops, each with the glue that belongs to it."""
    task, root, graph, shapes = trace.task, trace.root, trace.graph, trace.shapes
    ends = (trace.loss, *results.nodes.values())
    at_hand = None if trained is None else AtHand.of(trained, root, ends)
    homes = find_homes(trace, workload, at_hand)
    check_homes(task.name, root, graph, homes.op)
    cutter = Cutter(trace, homes, finder.observer.kinds, results.nodes)
    ops = tuple(cutter.op(index) for index in range(homes.num_ops))
    fields = {str(n.target): shapes.spec(n, task.name) for n in graph.nodes if n.op == "placeholder"}
    made = TaskGraph(task, root, ops, cutter.values, fields, _loss_inside(trace), findings=finder.findings)
    specs = {key: shapes.spec(node, task.name) for key, node in results.nodes.items()}
    made = finder.flows.into(split_pairs(made, workload, finder.pairs))
    return replace(made, results=specs, left_out=results.left_out)


def _check_names(task: Task | FlowTask, root: nn.Module, graph: fx.Graph) -> None:
    """Refuse what a task's module holds under a name that ops, which are fx.GraphModules, need themselves."""
    holder = "task" if isinstance(task, FlowTask) else type(root).__name__
    for node in graph.nodes:
        name = str(node.target).partition(".")[0]
        if node.op not in ("call_module", "get_attr") or name not in _NAMES_OF_OPS:
            continue
        hint = (
            "Give the module's class another name, of which its own is made."
            if isinstance(task, FlowTask)
            else f"Call it something else in {holder} (self.{name}_net, say). Further down any name will do."
        )
        raise refusal(
            task.name,
            f"the {holder} has a part called {name!r}, which torch.fx calls something else",
            node.meta.get("place"),
            hint,
        )


def _refuse_unused(
    task: str, root: nn.Module, graph: fx.Graph, shapes: Shapes, samples: Callable[[], Samples]
) -> None:
    """Refuse calls that no loss is made of, and that change parameters or buffers all the same: nobody would
    run them.
    """
    unused = unused_in(graph, shapes)
    if not any(_holds_something(root, node) for node in unused):
        return
    observed = samples()
    for node in unused:
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        statistics = () if module is None else [f"{node.target}.{name}" for name in statistics_of(module)]
        changed = [*statistics, *observed.changed(node)]
        if changed:
            what = node.name if module is None else f"{node.target} ({type(module).__name__})"
            raise refusal(
                task,
                f"the loss is made of nothing that {what} gives, so that nobody would run it; but it changes "
                f"{repr(changed[0]) if module is not None else 'a parameter or buffer'}",
                node.meta.get("place"),
                "Leave the call out where nothing needs what it changes. Otherwise let the loss be made of "
                "it, without a gradient: loss + 0 * unused.detach().mean().",
            )


def _holds_something(root: nn.Module, node: fx.Node) -> bool:
    if node.op != "call_module":
        return any(source.op == "get_attr" for source in node.all_input_nodes)
    module = root.get_submodule(str(node.target))
    return any(True for _ in (*module.buffers(), *module.parameters()))


def _loss_inside(trace: Trace) -> str | None:
    """The name of the last operator, if it gives a loss."""
    if not trace.operators or not hands_on_whole(trace, trace.operators[-1]):
        return None
    return str(trace.operators[-1].target)


def _operators(task: Task | FlowTask, root: nn.Module, graph: fx.Graph, workload: Workload) -> list[fx.Node]:
    """The nodes that run an operator, in order: in a FlowTask, all that call a module."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    if isinstance(task, FlowTask):
        return calls
    classes = workload.operator_classes
    return [node for node in calls if isinstance(root.get_submodule(str(node.target)), classes)]


def _argument_specs(node: fx.Node, shapes: Shapes) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor that an operator is given, in order."""
    values = [shapes.values[source] for source in node.all_input_nodes]
    return [(tuple(value.shape), str(value.dtype)) for value in values if isinstance(value, Tensor)]
