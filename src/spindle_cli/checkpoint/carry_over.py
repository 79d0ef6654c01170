"""What a run takes over from a checkpoint of another task set, by the user's own names. No torch.

A parameter that tasks share has a name in each of them. It is saved under one, with the others as aliases,
so that it is found again whichever of the tasks are still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spindle_cli.checkpoint.index import Checkpoint
from spindle_cli.checkpoint.names import model_names

Names = Mapping[str, Sequence[str]]  # canonical name -> all names of the same tensor, itself among them


@dataclass(frozen=True)
class CarryOver:
    """Names of the workload and of the checkpoint, side by side.

    Attributes:
        kept: name in the workload -> name that it was saved under.
        new: of the workload, what the checkpoint does not have.
        left_out: of the checkpoint, what the workload no longer has.
    """

    kept: Mapping[str, str]
    new: tuple[str, ...]
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, saved: Names, wanted: Names) -> CarryOver:
        """Match what was saved with what the workload wants.

        Where what tasks had apart is one parameter now, it is that of the first of them; what they shared and
        now have apart is copied to each.
        """
        saved_as = {name: canonical for canonical, names in saved.items() for name in names}
        kept: dict[str, str] = {}
        for canonical, names in wanted.items():
            found = next((saved_as[name] for name in names if name in saved_as), None)
            if found is not None:
                kept[canonical] = found
        used = set(kept.values())
        return cls(
            kept,
            tuple(name for name in wanted if name not in kept),
            tuple(name for name in saved if name not in used),
        )


def saved_names(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """All names of every parameter and buffer that a checkpoint has."""
    return with_aliases(model_names(checkpoint.tensors), checkpoint.aliases)


def with_aliases(names: Iterable[str], aliases: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """These names, each with its aliases behind it."""
    return {name: (name, *aliases.get(name, ())) for name in names}


def task_of(name: str, tasks: Iterable[str]) -> str:
    """The task that a name '<task>.<dotted name>' begins with; of several, the longest."""
    fitting = [task for task in tasks if name.startswith(f"{task}.")]
    return max(fitting, key=len, default=name.split(".", 1)[0])
