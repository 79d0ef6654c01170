"""Judging plans that run in turn: each by its own step, where devices hold what they use in any of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spindle_cli.account.device_memory import DeviceMemory, device_memory, optimizer_steps_s
from spindle_cli.account.joint import joint_of
from spindle_cli.account.traffic import communicator_bytes, traffic_of
from spindle_cli.plan.placing.predict import Prediction, predict
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.schedule import placed_slices
from spindle_cli.plan.search.judge import has_room
from spindle_cli.plan.types import Slice


@dataclass(frozen=True)
class InTurn:
    """Plans that run in turn, that of all tasks first: of each its slices, what each device holds, and how
    long its step takes. `sums_by_node`: as a plan says it.
    """

    slices: tuple[tuple[Slice, ...], ...]
    memory: tuple[tuple[DeviceMemory, ...], ...]
    predictions: tuple[Prediction, ...]
    sums_by_node: bool = True

    def mean_s(self, shares: Sequence[float]) -> float:
        """Seconds of an iteration on average; `shares`: of the steps, of every plan but that of all tasks."""
        steps = zip(self.predictions[1:], shares, strict=True)
        return sum(prediction.iteration_s * share for prediction, share in steps)


def judge_in_turn(problems: Sequence[Problem], slices: Sequence[tuple[Slice, ...]]) -> InTurn | None:
    """Judge plans that run in turn; None where one does not fit the devices' memory, either with what goes by
    nodes or with all over all devices at once.

    Args:
        problems: of all tasks, then of each set's.
        slices: of each, in order of start.
    """
    by_node = _judged(problems, slices, sums_by_node=True)
    return by_node or _judged(problems, slices, sums_by_node=False)


def _judged(
    problems: Sequence[Problem], slices: Sequence[tuple[Slice, ...]], *, sums_by_node: bool
) -> InTurn | None:
    whole = problems[0]
    joint = joint_of(slices, whole.profile.by_name)
    communicators: tuple[int, ...] | None = None
    memory, predictions = [], []
    for member, (problem, own) in enumerate(zip(problems, slices, strict=True)):
        own_placed = placed_slices(problem, own)
        placed = replace(own_placed, joint=joint, member=member, sums_by_node=sums_by_node)
        traffic = traffic_of(placed)
        if communicators is None:  # those of all plans
            communicators = communicator_bytes(placed)
        profile, cluster = problem.profile, problem.cluster
        needs = device_memory(profile.metaops, own, cluster, profile, communicators, (joint, member))
        if not has_room(problem, needs):
            return None
        steps_s = optimizer_steps_s(needs, profile.optimizer_s_per_byte)
        compute_s = max(piece.last_s for piece in own)
        memory.append(needs)
        predictions.append(predict(problem, own, traffic, compute_s, steps_s))
    return InTurn(tuple(slices), tuple(memory), tuple(predictions), sums_by_node)
