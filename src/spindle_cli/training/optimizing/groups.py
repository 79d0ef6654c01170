"""Which optimizer group each trained parameter is in, by the rules of the train settings.

Rules name kinds of parameters in one word, and classes of the modules that hold them.

What optimizers keep of parameters: bytes, for a profile.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.files.artifact import shown
from spindle_cli.files.tensors import parse_key
from spindle_cli.training.optimizing.optimizer import imported, make_optimizer, state_per_param, where_raised
from spindle_cli.training.precision import number_format
from spindle_cli.units import format_bytes
from spindle_cli.workload.building.load import settled_module_name
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.graph import ParameterTable, WorkloadGraph
from spindle_cli.workload.settings.updates import GroupRule, Kind, OptimizerChoice

_SHOWN = 3
# Why an optimizer cannot work on a part of a parameter.
_WHOLE_ONLY = {
    "Adafactor": "it keeps means over a matrix's rows and columns",
    "Muon": "it orthogonalises whole matrices",
}


@dataclass
class Candidate:
    """A trained parameter. `names`: in every task that has it, the canonical one first; `owners`: the modules
    that hold it.
    """

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)


@dataclass(frozen=True)
class OptimizerGroups:
    """The optimizer groups of a workload. `choices`: their settings; `of`: canonical name -> index of the
    group, of every trained parameter. `whole`: names of those that a constraint needs all of.
    """

    choices: tuple[OptimizerChoice, ...]
    of: Mapping[str, int]
    whole: frozenset[str] = frozenset()

    def of_key(self, key: str) -> int:
        """Group of a parameter, or of a fragment of one by its key."""
        return self.of[key] if key in self.of else self.of[parse_key(key)[0]]

    def choice_of(self, key: str) -> OptimizerChoice:
        """Settings of a parameter, or of a fragment."""
        return self.choices[self.of_key(key)]

    def treats_elements_alone(self, key: str) -> bool:
        """Whether a part of a parameter can be updated without the rest; of a fragment, whether of it."""
        is_whole = key in self.whole or (key not in self.of and parse_key(key)[0] in self.whole)
        return self.choice_of(key).treats_elements_alone and not is_whole

    def names(self) -> dict[str, tuple[str, ...]]:
        """Canonical names of each group's parameters, by its name; empty where the settings name no group."""
        members: dict[str, list[str]] = {
            choice.name: [] for choice in self.choices if choice.name is not None
        }
        for name, index in self.of.items():
            group = self.choices[index].name
            if group is not None:
                members[group].append(name)
        return {group: tuple(names) for group, names in members.items()}


def optimizer_groups(train: TrainSettings, roots: Mapping[str, nn.Module]) -> OptimizerGroups:
    """Sort the trained parameters of all tasks into the groups of `train`.

    Args:
        roots: each task's module, in the workload's order.

    Raises:
        WorkloadError: a parameter fits no rule or several, a rule fits no parameter, or its function cannot
            be found or fails; or a parameter has too few bits for the precision.
    """
    candidates = trained_candidates(roots)
    _require_wide_enough(train, candidates)
    if train.groups is None:
        return OptimizerGroups(train.choices, dict.fromkeys(candidates, 0))
    fitting = _fitting(train.groups, candidates)
    _require_at_most_one(train.groups, fitting)
    rest = next((index for index, rule in enumerate(train.groups) if rule.rest), None)
    lonely = [name for name, indices in fitting.items() if not indices]
    if rest is None and lonely:
        raise WorkloadError(
            f"train.groups: no group takes parameter {_listed(lonely)}; the groups are "
            f"{', '.join(rule.name for rule in train.groups)}",
            hint="Add `rest` to the list, for all that no other group takes, or widen one of them.",
        )
    return OptimizerGroups(
        train.choices, {name: indices[0] if indices else rest or 0 for name, indices in fitting.items()}
    )


def _fitting(rules: Sequence[GroupRule], candidates: Mapping[str, Candidate]) -> dict[str, list[int]]:
    """Return, by the parameter's name, the indices of the rules that take it; `rest` takes none here."""
    fitting: dict[str, list[int]] = {name: [] for name in candidates}
    for index, rule in enumerate(rules):
        for name in () if rule.rest else _taken(rule, candidates):
            fitting[name].append(index)
    return fitting


def _require_wide_enough(train: TrainSettings, candidates: Mapping[str, Candidate]) -> None:
    """Refuse what `torch.amp.GradScaler` refuses: complex numbers, and gradients that overflow again once the
    scale is out.
    """
    for name, candidate in candidates.items():
        dtype = candidate.parameter.dtype
        if train.scaling is not None and (dtype.itemsize < 4 or dtype.is_complex):
            kind = str(dtype).removeprefix("torch.")
            raise WorkloadError(
                f"train.precision: fp16-autocast trains parameters that are float32, and {name} is {kind}",
                hint="Build the model in float32: autocast makes its passes float16.",
            )


def groups_of_graph(train: TrainSettings, graph: WorkloadGraph) -> OptimizerGroups:
    """`optimizer_groups` of an analysed workload, once optimizers are known to take their parameters.

    Raises:
        WorkloadError: as `optimizer_groups`, or an optimizer refuses a parameter, or would undo what a
            forward writes into it.
    """
    _require_masters_kept(train, graph)
    roots = {name: task.root for name, task in graph.tasks.items()}
    _require_declared(train, graph)
    whole = frozenset(
        constraint.name for constraint in graph.constraints if not constraint.treats_elements_alone
    )
    groups = replace(optimizer_groups(train, roots), whole=whole)
    for name, candidate in trained_candidates(roots).items():
        choice = groups.choice_of(name)
        if candidate.parameter.is_complex():
            _require_complex(train, choice, name, candidate.parameter)
        if not choice.treats_elements_alone:
            _require_shape(choice, name, candidate.parameter)
    return groups


def _require_complex(
    train: TrainSettings, choice: OptimizerChoice, name: str, parameter: nn.Parameter
) -> None:
    """Refuse a parameter of complex numbers where something takes none, or one half of them alone."""
    kind = str(parameter.dtype).removeprefix("torch.")
    hint = "Keep it as pairs of real numbers, and let forward take torch.view_as_complex of them."
    if parameter.dtype is torch.complex128:
        raise WorkloadError(f"parameter {name} is {kind}, which checkpoints have no name for", hint=hint)
    if choice.optimizer in _WHOLE_ONLY:
        raise WorkloadError(
            f"{choice.key}: {choice.optimizer} trains real numbers, and parameter {name} is {kind}",
            hint=f"Give it to another optimizer, by groups. Or: {hint[0].lower()}{hint[1:]}",
        )
    if train.clip_value is not None:
        raise WorkloadError(
            f"train.clip_value clips real numbers, and parameter {name} is {kind}",
            hint=f"Clip by `clip_norm`. Or: {hint[0].lower()}{hint[1:]}",
        )
    if train.local_sgd is not None:
        raise WorkloadError(
            f"train.local_sgd averages real numbers, and parameter {name} is {kind}", hint=hint
        )


def _require_declared(train: TrainSettings, graph: WorkloadGraph) -> None:
    """Refuse train settings that do not go with what the workload does to parameters beside the optimizer."""
    for key, names in (
        ("follows", [slow for following in graph.following for slow, _ in following.pairs]),
        ("constraints", [constraint.name for constraint in graph.constraints]),
    ):
        if names and train.local_sgd is not None:
            raise WorkloadError(
                f"train.local_sgd does not go with the workload's {key}, such as of {names[0]}: the mean of "
                "the islands would be taken without",
                hint="Leave local_sgd out.",
            )
    for following in graph.following if train.precision == "bf16" else ():
        raise WorkloadError(
            f"train.precision: bf16 holds {following.pairs[0][0]} in 8 bits, in which a moving average with "
            "a decay near 1 never moves",
            hint="Use precision: bf16-autocast, which holds parameters in float32.",
        )


def _require_masters_kept(train: TrainSettings, graph: WorkloadGraph) -> None:
    """Refuse trained parameters that a forward changes, where updates are those of float32 masters."""
    for task in graph.tasks.values() if train.precision == "bf16" else ():
        for op in task.ops:
            for name in op.changes:
                if name in op.parameters and task.root.get_parameter(name).requires_grad:
                    raise WorkloadError(
                        f"task {task.task.name!r}: the forward of {op.target!r} changes {name!r}, which is "
                        "trained, and precision: bf16 updates it from a float32 copy, which would not see it "
                        "changed",
                        hint="Use precision: bf16-autocast, or compute with what it would become without "
                        "writing it.",
                    )


def _require_shape(choice: OptimizerChoice, name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter that an optimizer of matrices does not take."""
    stand_in = nn.Parameter(torch.empty_like(parameter, device="meta"))
    try:
        make_optimizer(choice, [stand_in])
    except WorkloadError as error:
        error.message = f"{error.message} (parameter {name}, of shape {tuple(parameter.shape)})"
        error.hint = "Give it matrices alone, by groups, and the rest another optimizer."
        raise


def require_elementwise(groups: OptimizerGroups, split: frozenset[str]) -> None:
    """Refuse, where parameters are split, an optimizer that is not known to treat each element by itself.

    Args:
        split: canonical names of the parameters that tensor parallelism splits.

    Raises:
        WorkloadError: one of them has such an optimizer; which, and why.
    """
    for name in sorted(split & groups.of.keys()):
        choice = groups.choice_of(name)
        if name in groups.whole:
            raise WorkloadError(
                f"constraints: unit_norm of {name} takes whole vectors, and tensor parallelism splits it",
                hint="Plan from a profile without tp > 1.",
            )
        if choice.treats_elements_alone:
            continue
        reason = _WHOLE_ONLY.get(choice.optimizer, "it is not known to treat each element by itself")
        hint = "Use another optimizer, or plan from a profile without tp > 1."
        if choice.is_imported:
            hint = f"If it does, say `contract: element-wise`. {hint}"
        raise WorkloadError(
            f"{choice.key}: {choice.optimizer} cannot train "
            f"layers split by tensor parallelism, such as that of {name}: {reason}",
            hint=hint,
        )


def trained_candidates(roots: Mapping[str, nn.Module]) -> dict[str, Candidate]:
    """Return every distinct parameter that takes a gradient, by canonical name."""
    by_id: dict[int, Candidate] = {}
    for task, root in roots.items():
        modules = dict(root.named_modules(remove_duplicate=False))
        for dotted, parameter in root.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            candidate = by_id.setdefault(id(parameter), Candidate(parameter))
            candidate.names.append(f"{task}.{dotted}")
            candidate.owners.append(modules[dotted.rpartition(".")[0]])
    return {candidate.names[0]: candidate for candidate in by_id.values()}


def _taken(rule: GroupRule, candidates: Mapping[str, Candidate]) -> list[str]:
    """Names of what a rule takes."""
    function = None if rule.function is None else imported(rule.function, f"train.groups: {rule.name}")
    _require_patterns_fit(rule, candidates)
    taken = [name for name, candidate in candidates.items() if _fits(rule, candidate, function)]
    if not taken and rule.name != "no_decay":
        raise WorkloadError(
            f"train.groups: group {shown(rule.name)} takes no trained parameter ({rule.selects_by})",
            hint=f"Correct it, or leave it out. Names are such as {_listed(list(candidates))}.",
        )
    return taken


def _require_patterns_fit(rule: GroupRule, candidates: Mapping[str, Candidate]) -> None:
    """Refuse a pattern that fits no name at all: most likely it is misspelt."""
    names = [name for candidate in candidates.values() for name in candidate.names]
    for key, patterns in (("parameters", rule.parameters), ("excluding", rule.excluding)):
        for pattern in patterns or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
                hint = f"The closest is {close[0]}." if close else "No parameter is trained."
                raise WorkloadError(
                    f"train.groups: {rule.name}: {key}: {shown(pattern)} fits the name of no trained "
                    "parameter",
                    hint=f"{hint} Names are '<task>.<name in the task's module>'; `*` stands for anything.",
                )


def _fits(rule: GroupRule, candidate: Candidate, function: Callable[..., Any] | None) -> bool:
    if rule.parameters is not None and not _named(candidate, rule.parameters):
        return False
    if rule.excluding is not None and _named(candidate, rule.excluding):
        return False
    if rule.modules is not None and not any(is_of_class(owner, rule.modules) for owner in candidate.owners):
        return False
    if rule.kinds is not None and not any(
        is_of_kind(kind, candidate.names, candidate.owners, candidate.parameter) for kind in rule.kinds
    ):
        return False
    return function is None or _says(rule, candidate, function)


def _named(candidate: Candidate, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for name in candidate.names for pattern in patterns)


def _says(rule: GroupRule, candidate: Candidate, function: Callable[..., Any]) -> bool:
    """Return what the user's function says of a parameter, which has no values in any process."""
    stand_in = nn.Parameter(torch.empty_like(candidate.parameter, device="meta"), requires_grad=True)
    try:
        answer = function(candidate.names[0], stand_in)
    except Exception as error:
        raise WorkloadError(
            f"train.groups: {rule.name}: {rule.function} failed for {candidate.names[0]}: "
            f"{type(error).__name__}: {error}{where_raised(error)}"
        ) from error
    if not isinstance(answer, bool):
        raise WorkloadError(
            f"train.groups: {rule.name}: {rule.function} gave {answer!r:.80} for {candidate.names[0]}; "
            "expected True or False"
        )
    return answer


def _require_at_most_one(rules: tuple[GroupRule, ...], fitting: Mapping[str, list[int]]) -> None:
    twice = {name: indices for name, indices in fitting.items() if len(indices) > 1}
    for name, indices in twice.items():
        both = " and ".join(f"{rules[index].name} ({rules[index].selects_by})" for index in indices)
        alike = [peer for peer, theirs in twice.items() if theirs == indices]
        raise WorkloadError(
            f"train.groups: parameter {_listed(alike)} fits {len(indices)} groups, {both}; expected one",
            hint=f"Narrow one of them, for example with `excluding: [{name!r}]`; there is no order in which "
            "groups would take parameters.",
        )


def _listed(names: list[str]) -> str:
    more = f" (and {len(names) - _SHOWN} more)" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# Told by the names of classes, as those of other libraries derive from none of torch's:
# LayerNorm, BatchNorm2d, LlamaRMSNorm; Embedding, EmbeddingBag, BertEmbeddings.
_NORM = re.compile(r"norm(\d?d)?$", re.IGNORECASE)
_EMBEDDING = re.compile(r"embeddings?(bag)?$", re.IGNORECASE)


def is_of_class(module: nn.Module, wanted: Iterable[str]) -> bool:
    """Whether a module is of one of these classes, or of one derived from them.

    `wanted`: names, or 'package.module:Name'. A workload file's own module is called as its file.
    """
    names = {name for base in type(module).__mro__ for name in _names_of(base)}
    return any(name in names for name in wanted)


def _names_of(cls: type) -> tuple[str, str]:
    return cls.__name__, f"{settled_module_name(cls.__module__)}:{cls.__qualname__}"


def is_of_kind(
    kind: Kind, names: Sequence[str], owners: Sequence[nn.Module], parameter: nn.Parameter
) -> bool:
    """Whether a parameter is of a kind.

    Args:
        names: all that it has.
        owners: the modules that have it; with one embedding among them (tied weights) it is one.
    """
    match kind:
        case "norms":
            return any(_is_called(owner, _NORM) for owner in owners)
        case "biases":
            return any(_is_bias(name.rpartition(".")[2]) for name in names)
        case "embeddings":
            return any(_is_called(owner, _EMBEDDING) for owner in owners)
        case "matrices":
            return parameter.dim() == 2 and not is_of_kind("embeddings", names, owners, parameter)
        case "vectors":
            return parameter.dim() < 2


def _is_called(module: nn.Module, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(base.__name__) for base in type(module).__mro__ if base is not nn.Module)


def _is_bias(name: str) -> bool:
    """`bias`, `in_proj_bias`, `bias_hh_l0`."""
    return name == "bias" or name.endswith("_bias") or name.startswith("bias_")


@dataclass(frozen=True)
class KeptState:
    """What an optimizer keeps for some trained parameters, for each byte of them: bytes of state that devices
    may share, bytes that each device with the parameters keeps whole, and the share of the parameters that
    the latter is of.
    """

    shared: float = 0.0
    whole: float = 0.0
    whole_share: float = 0.0


class StateSizes:
    """What the optimizers of some train settings keep."""

    def __init__(self, train: TrainSettings, groups: OptimizerGroups) -> None:
        """Raises WorkloadError: an optimizer cannot be made."""
        self._groups = groups
        self._per_param = [train.state_per_param(state_per_param(choice)) for choice in groups.choices]
        self._shards = train.shard_optimizer

    def of(self, parameters: Iterable[tuple[str, Tensor]]) -> KeptState | None:
        """Return what is kept for parameters by canonical name; None where none of them is trained."""
        shared = whole = stepped_whole = total = 0.0
        for name, parameter in parameters:
            if name not in self._groups.of:
                continue
            num_bytes = parameter.numel() * parameter.itemsize
            index = self._groups.of[name]
            kept = num_bytes * self._per_param[index]
            total += num_bytes
            if self._shards and not self._groups.treats_elements_alone(name):
                whole += kept
                stepped_whole += num_bytes
            else:
                shared += kept
        if not total:
            return None
        return KeptState(shared / total, whole / total, stepped_whole / total)


def stepped_whole(train: TrainSettings, groups: OptimizerGroups, graph: WorkloadGraph) -> tuple[str, ...]:
    """For people: optimizers whose state is not spread over the devices that hold the same parameters,
    although `train` asks for that, and what it comes to.

    Raises:
        WorkloadError: an optimizer cannot be made.
    """
    if not train.shard_optimizer:
        return ()
    table, held_as = ParameterTable.of(graph), number_format(train)
    lines = []
    for index, choice in enumerate(groups.choices):
        parameters = [table.parameters[name] for name, group in groups.of.items() if group == index]
        sizes = [parameter.numel() * (held_as or parameter.dtype).itemsize for parameter in parameters]
        if choice.treats_elements_alone or not sizes:
            continue
        state = sum(sizes) * train.state_per_param(state_per_param(choice))
        which = "" if choice.name is None else f" (group {choice.name})"
        lines.append(
            f"{choice.optimizer}{which} steps whole parameters: every device that holds one of these "
            f"{len(sizes)} ({format_bytes(sum(sizes))}) keeps its state ({format_bytes(state)} of all) and "
            "steps it, and shares neither with others"
        )
    return tuple(lines)


def kept_per_param(train: TrainSettings, graph: WorkloadGraph) -> float:
    """Return the bytes of state for each byte of all trained parameters of a workload.

    Raises:
        WorkloadError: an optimizer cannot be made, or parameters do not fit the groups.
    """
    table = ParameterTable.of(graph)
    kept = StateSizes(train, groups_of_graph(train, graph)).of(table.parameters.items()) or KeptState()
    return kept.shared + kept.whole
