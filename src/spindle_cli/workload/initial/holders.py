"""What of a workload has initial values: its parameters, and the buffers that a state_dict would hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spindle_cli.workload.parameters import root_of
from spindle_cli.workload.types import Workload

# PEFT puts a layer that it adapts one step further down, under this name.
_PEFT_STEP = ".base_layer."


@dataclass
class Holders:
    """By canonical name, as `ParameterTable` gives them ('<first task that has it>.<dotted name there>').

    Attributes:
        tensors: each distinct one once, in the workload's order.
        canonical: every name that one has in any task -> its canonical name; of what PEFT has wrapped also
            the name that it had before.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    canonical: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: Workload) -> Holders:
        """Those of a built workload, whether its parameters are real or not."""
        found, by_id = cls(), dict[int, str]()
        for task in workload.all_tasks:
            root = root_of(task)
            passing = _not_saved(root)
            for dotted, tensor in (
                *root.named_parameters(remove_duplicate=False),
                *root.named_buffers(remove_duplicate=False),
            ):
                name = f"{task.name}.{dotted}"
                if dotted in passing or is_lazy(tensor):
                    continue
                known = by_id.setdefault(id(tensor), name)
                found.tensors.setdefault(known, tensor)
                found.canonical[name] = known
        for name, known in list(found.canonical.items()):
            found.canonical.setdefault(name.replace(_PEFT_STEP, "."), known)
        return found

    @property
    def names(self) -> dict[str, list[str]]:
        """Canonical name -> all names of the same tensor."""
        found: dict[str, list[str]] = {name: [] for name in self.tensors}
        for name, known in self.canonical.items():
            found[known].append(name)
        return found


def _not_saved(root: nn.Module) -> set[str]:
    """Dotted names of the buffers that a state_dict would not hold."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in root.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
