"""Operators that move parameters of their own in forward: a teacher, a codebook."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.errors import WorkloadError
from spindle_cli.profile.checking.run import CheckSettings, check_numbers
from spindle_cli.workload.types import Task, Workload

from .toy import WIDTH, Block, Items


class Teacher(nn.Module):
    """A moving average of a student, which says what to learn."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student, self.average = student, copy.deepcopy(student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.average.parameters(), self.student.parameters(), strict=True):
                self.move(ours, theirs)
            given: Tensor = self.average(x)
            return given

    def move(self, ours: nn.Parameter, theirs: nn.Parameter) -> None:
        ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)


class ByLists(Teacher):
    def move(self, ours: nn.Parameter, theirs: nn.Parameter) -> None:
        torch._foreach_mul_([ours], 0.9)
        torch._foreach_add_([ours], [theirs], alpha=0.1)


class InNewMemory(Teacher):
    def move(self, ours: nn.Parameter, theirs: nn.Parameter) -> None:
        ours.data = ours.data * 0.9 + theirs.data * 0.1


class Distilled(nn.Module):
    def __init__(self, teacher: type[Teacher]) -> None:
        super().__init__()
        self.student = Block()
        self.teacher = teacher(self.student)

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.student(x), self.teacher(x).detach())


class Codebook(nn.Module):
    """As in repositories that train by moving averages: another parameter after each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.codes.weight = nn.Parameter(self.codes.weight * 0.9 + 0.1 * x.mean((0, 1)))
        return x + self.codes.weight[0].detach()


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.codebook = Block(), Codebook()

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.codebook(self.block(x)).square().mean()
        return loss


def workload(module: nn.Module, *operators: type[nn.Module]) -> Workload:
    return Workload("w", [Task("t", module, 4, Items(x=(4, WIDTH)))], (Block, *operators))


@pytest.mark.parametrize("teacher", [Teacher, ByLists, InNewMemory])
def test_a_teacher_that_its_operator_moves_is_moved_once_a_batch(teacher: type[Teacher]) -> None:
    """Shares and micro-batches would move their copies each by itself."""
    graph = analysed(workload(Distilled(teacher), teacher))
    assert [metaop.coupled for metaop in graph.metaops] == [False, True, False]
    assert "its forward changes 'average." in str(graph.notes)


@pytest.mark.parametrize("teacher", [Teacher, InNewMemory])
def test_both_runs_of_a_check_begin_with_the_teacher_as_it_was(teacher: type[Teacher]) -> None:
    graph = analysed(workload(Distilled(teacher), teacher))
    (found,) = check_numbers(graph, 0, CheckSettings(threads=1)).tasks
    assert found.forward_unchecked is None


def test_an_operator_that_replaces_its_parameter_is_refused() -> None:
    """The optimizer, checkpoints and exports have the parameter that was there, which stays as it was."""
    with pytest.raises(WorkloadError) as caught:
        analysed(workload(Quantised(), Codebook))
    assert "'codebook' (Codebook) puts another parameter in the place of 'codes.weight'" in str(caught.value)


class Mover(Teacher):
    """Moves the teacher, and lets others compute with it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.average.parameters(), self.student.parameters(), strict=True):
                self.move(ours, theirs)
        return x.clone()


class MovedBefore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = Block()
        self.mover = Mover(self.student)
        self.teacher = self.mover.average

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.student(x), self.teacher(self.mover(x)).detach())


class MovedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = Block()
        self.teacher = Teacher(self.student)

    def forward(self, x: Tensor) -> Tensor:
        target = self.teacher(x) + self.teacher(x.flip(1))
        return functional.mse_loss(self.student(x), target.detach())


@pytest.mark.parametrize(("model", "operator"), [(MovedBefore, Mover), (MovedTwice, Teacher)])
def test_a_teacher_that_others_use_too_is_refused(model: type[nn.Module], operator: type[nn.Module]) -> None:
    """They may run on other devices, whose copies would stay as they are."""
    with pytest.raises(WorkloadError, match="changes parameters that are not trained"):
        analysed(workload(model(), operator))


class FrozenPositions(nn.Module):
    """A student and its moved copy over positions that nothing moves."""

    def __init__(self, positions: nn.Parameter) -> None:
        super().__init__()
        self.positions, self.block = positions, Block()

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = self.block(x + self.positions)
        return given


class CountingTeacher(Teacher):
    """Moves some parameters at each step, and others now and then."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__(student)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        if self.step % 100 == 0:
            with torch.no_grad():
                for parameter in self.average.parameters():
                    parameter.mul_(0.5)
        return super().forward(x)


class Positioned(nn.Module):
    def __init__(self, teacher: type[Teacher]) -> None:
        super().__init__()
        self.student = FrozenPositions(nn.Parameter(torch.ones(WIDTH), requires_grad=False))
        self.teacher = teacher(self.student)

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.student(x), self.teacher(x).detach())


def test_what_a_mover_leaves_as_it_is_may_be_used_by_others() -> None:
    """Frozen embeddings of positions, say, of the encoder that it averages."""
    graph = analysed(workload(Positioned(Teacher), Teacher))
    (op,) = [op for op in graph.tasks["t"].ops if op.target == "teacher"]
    assert "teacher.student.positions" in op.parameters
    assert all(name.startswith("teacher.average.") for name in op.changes)


def test_a_mover_that_counts_may_move_what_is_frozen_at_another_step() -> None:
    with pytest.raises(WorkloadError, match="changes parameters that are not trained"):
        analysed(workload(Positioned(CountingTeacher), CountingTeacher))
