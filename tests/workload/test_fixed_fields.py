"""Fields whose values forward reads: taken as the same in every sample, checked, and split all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.analyse import analyse, analyse_for_others
from spindle_cli.analysis.fixed import fix, rows_within, state_of_values
from spindle_cli.analysis.rules.types import WHOLE, Batch, Mixed
from spindle_cli.errors import WorkloadError
from spindle_cli.workload.types import Task

from .grids import BATCH, PATCHES, WIDTH, Join, Patches, Shown, task_of, workload_of
from .shares import assert_trains_as_plain, run_cut, run_plain

SIZES = (3, 5, 4, 1)


def window(grid: Tensor) -> Tensor:
    """Of each image the patches in another order, as windows have them."""
    found, first = [], 0
    for rows, columns in grid.tolist():
        found.append(torch.arange(rows * columns).reshape(rows, columns).T.flatten() + first)
        first += rows * columns
    return torch.cat(found)


class Windows(nn.Module):
    """`window` as an operator."""

    def forward(self, rows: Tensor, grid: Tensor) -> Tensor:
        """The rows in the windows' order."""
        return rows[window(grid)]


def _check_same(task: Task, whole: tuple[int, ...] = ()) -> None:
    """Shares of one and three samples train as the whole batch; only ops `whole` are not split."""
    torch.manual_seed(0)
    task.module.double()
    graph = analysed(workload_of(task)).tasks["t"]
    assert tuple(op.index for op in graph.ops if op.coupled) == whole
    batch = torch.utils.data.default_collate([task.dataset[index] for index in range(BATCH)])
    batch["x"] = batch["x"].double()
    assert_trains_as_plain(task, graph, batch, [0, 1, BATCH], rtol=0, atol=1e-14)


@pytest.mark.parametrize("per_row", [False, True], ids=["an image a segment", "a row a segment"])
def test_layers_that_split_by_lengths_of_a_field_are_split_over_the_batch(per_row: bool) -> None:
    _check_same(task_of(Patches(per_row=per_row)))


JOINED: dict[str, Join] = {
    "stacked and flattened": lambda layer, parts: torch.stack([layer.attend(p) for p in parts]).flatten(0, 1),
    "more of a sample than its own rows is cut off": lambda layer, parts: torch.cat(
        [torch.cat([layer.attend(part), part])[: len(part)] for part in parts]
    ),
    "two loops": lambda layer, parts: (
        torch.cat([layer.attend(part) for part in parts]) * torch.cat([part * 2 for part in parts])
    ),
}


@pytest.mark.parametrize("name", JOINED)
def test_samples_parts_that_are_joined_in_order_are_split(name: str) -> None:
    _check_same(task_of(Patches(JOINED[name])))


MIXED: dict[str, Join] = {
    "another order": lambda layer, parts: torch.cat([layer.attend(part) for part in parts[::-1]]),
    "the first is another": lambda layer, parts: torch.cat(
        [parts[0] * 2, *(layer.attend(part) for part in parts[1:])]
    ),
    "the last is another": lambda layer, parts: torch.cat(
        [*(layer.attend(part) for part in parts[:-1]), parts[-1] * 2]
    ),
    "each by its number": lambda layer, parts: torch.cat(
        [part * position for position, part in enumerate(parts)]
    ),
    "by how many there are": lambda layer, parts: torch.cat([part / len(parts) for part in parts]),
    "with the one before": lambda layer, parts: torch.cat(
        [part + parts[position - 1] for position, part in enumerate(parts)]
    ),
    "one after another": lambda layer, parts: torch.cat(list(torch.stack(parts).cumsum(0))),
    "one of them": lambda layer, parts: parts[0].repeat(len(parts), 1),
    "changed between": lambda layer, parts: _changed_between(parts),
}


def _changed_between(parts: list[Tensor]) -> Tensor:
    whole = torch.cat(parts).detach()
    first, *rest = torch.split(whole, len(parts[0]))
    made = [first * 1.0]
    whole.mul_(2)
    return torch.cat([*made, *(part * 1.0 for part in rest)])


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_are_treated_unlike_are_not_split(name: str) -> None:
    _check_same(task_of(Patches(MIXED[name])), whole=(0, 1))


def _turned(grid: Tensor) -> Tensor:
    """Numbers of all patches, every second one and the one before swapped, if an image has an even number."""
    patches = torch.repeat_interleave(torch.ones_like(grid[:, 0]), grid.prod(-1)).cumsum(0) - 1
    return torch.where(patches % 2 == 0, patches + 1, patches - 1)


def test_patches_that_are_put_into_another_order_within_an_image_are_split() -> None:
    _check_same(task_of(Patches(pick=lambda grid: torch.argsort(_turned(grid)))))


def test_patches_of_other_images_are_picked_in_an_op_that_runs_whole() -> None:
    graph = analysed(workload_of(task_of(Patches(pick=lambda grid: torch.argsort(-_turned(grid))))))
    assert any("mixes the samples" in str(op.coupled_because) for op in graph.tasks["t"].ops)


def test_an_operator_that_makes_its_own_tensors_of_a_fields_numbers_is_not_split() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.windows, self.layer = Windows(), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor, grid: Tensor) -> Tensor:
            rows = self.windows(x.flatten(0, 1), grid)
            weights = torch.arange(1.0, PATCHES + 1).repeat(x.shape[0])
            return (self.layer(rows).squeeze(1) * weights).mean()

    module = Net()
    task = task_of(module)
    workload = workload_of(task)
    workload.operators = (Windows, nn.Linear)
    graph = analysed(workload).tasks["t"]
    assert [op.coupled for op in graph.ops] == [True, False]
    batch = torch.utils.data.default_collate([task.dataset[index] for index in range(BATCH)])
    loss = run_cut(graph, [batch], {op.index: [0, 3, BATCH] for op in graph.ops})
    torch.testing.assert_close(loss, run_plain(task, batch))


@pytest.mark.parametrize("odd", [0, 1, 15])
def test_layers_that_read_a_field_that_differs_among_the_first_samples_run_whole(odd: int) -> None:
    task = task_of(Patches(per_row=True), odd)
    graph = analysed(workload_of(task)).tasks["t"]
    assert all(spec.row is None for spec in graph.fields.values())
    assert all(op.coupled for op in graph.ops if "grid" in op.fields)
    batch = torch.utils.data.default_collate([task.dataset[index] for index in (odd, 2, 3, 4)])
    assert_trains_as_plain(task, graph, batch, [0, 1, BATCH])


def _first_op(module: nn.Module) -> tuple[Callable[..., object], list[Tensor]]:
    task = task_of(module)
    graph = analysed(workload_of(task)).tasks["t"]
    batch = torch.utils.data.default_collate([Shown(odd=17)[index] for index in (16, 17)])
    op = graph.ops[0]
    assert "grid" in op.fields and not op.inputs
    return graph.op_module(op), [batch[name] for name in op.fields]


def test_a_later_sample_that_differs_ends_the_run() -> None:
    run, fields = _first_op(Patches())
    with pytest.raises(WorkloadError, match=r"'grid' is \[3, 2\] in a sample, and \[2, 3\]"):
        run(*fields)


class Decides(nn.Module):
    """Takes a number and another way by the grid, which nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        """A loss."""
        turned = -x if int(grid[0, 0]) == 2 else x
        return self.own(turned.flatten(0, 1) * grid[0, 1].item()).pow(2).mean()


def test_a_number_that_is_written_into_the_trace_is_checked_too() -> None:
    task = task_of(Decides())
    workload = workload_of(task)
    workload.operators = (nn.Linear,)
    graph = analysed(workload).tasks["t"]
    for odd in (None, 3):
        batch = torch.utils.data.default_collate([Shown(odd)[index] for index in range(BATCH)])
        if odd is None:
            loss = run_cut(graph, [batch], {op.index: [0, 1, BATCH] for op in graph.ops})
            torch.testing.assert_close(loss, run_plain(task, batch))
        else:
            with pytest.raises(WorkloadError, match="'grid'"):
                run_cut(graph, [batch], {op.index: [0, 1, BATCH] for op in graph.ops})


def test_what_was_found_for_one_grid_is_not_taken_for_another() -> None:
    class Narrow(Shown):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {**super().__getitem__(index), "grid": torch.tensor([1, 2])}

    graph, memo = analyse_for_others(workload_of(task_of(Patches(per_row=True))))
    again = analyse(workload_of(task_of(Patches(per_row=True))), memo)
    assert again.fingerprint == graph.fingerprint
    other = task_of(Patches(per_row=True))
    other.dataset = Narrow()  # whose segments do not add up to the patches
    with pytest.raises(WorkloadError, match="fails for a batch"):
        analyse(workload_of(other), memo)


def test_it_is_noted_which_fields_are_taken_as_the_same() -> None:
    (note,) = analysed(workload_of(task_of(Patches()))).notes
    assert "'grid'" in note and "[2, 3]" in note and "every sample" in note


def _by_size(make: Callable[[int], Tensor]) -> list[Tensor]:
    return [make(size) for size in SIZES]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda size: torch.tensor([1, 2]), WHOLE),
        (lambda size: torch.tensor([1, 2]).repeat(size), Batch(0, 1, 2)),
        (lambda size: torch.tensor([[1, 2]]).repeat(3, size), Batch(1, 1, 2)),
        (lambda size: torch.tensor([[1], [2]]).expand(2, size), Batch(1)),
        (lambda size: torch.tensor([1, 2]).repeat_interleave(size), None),
        (lambda size: torch.arange(size), None),
        (lambda size: torch.tensor(size), None),
        (lambda size: torch.ones(size + 1), None),
        (lambda size: torch.ones(size, size), None),
        (lambda size: torch.ones((1,) * size), None),
    ],
)
def test_values_say_where_samples_lie(make: Callable[[int], Tensor], expected: object) -> None:
    found = state_of_values(_by_size(make), SIZES)
    assert isinstance(found, Mixed) if expected is None else found == expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda size: torch.arange(size * 4), 4),
        (lambda size: (torch.arange(size)[:, None] * 4 + torch.tensor([3, 0, 1])).flatten(), 4),
        (lambda size: torch.arange(size * 4).flip(0), 0),
        (lambda size: (torch.arange(size)[:, None] * 4 + torch.tensor([4, 0])).flatten(), 0),
        (lambda size: (torch.arange(size)[:, None] * 4 + torch.tensor([-1, 0])).flatten(), 0),
        (lambda size: torch.zeros(size, dtype=torch.long), 0),
        (lambda size: torch.arange(size * 4).reshape(size, 4).T.flatten(), 0),
        (lambda size: torch.arange(size * 4) * 1.0, 0),
        (lambda size: torch.arange(size * 4) + (size > 4), 0),
    ],
)
def test_numbers_of_rows_are_within_samples_or_not(make: Callable[[int], Tensor], expected: int) -> None:
    assert rows_within(_by_size(make), SIZES) == expected


def test_a_fixed_tensor_is_not_changed_by_what_has_no_values() -> None:
    from spindle_cli.analysis.fixed import ChangedInPlaceError, call

    fixed = fix(torch.zeros(2))
    with pytest.raises(ChangedInPlaceError):
        call(Tensor.add_, (fixed, torch.ones(2, device="meta")), {})
    made = call(torch.rand_like, (fix(torch.zeros(3)),), {})
    assert not hasattr(made, "_spindle_fixed")


OF_ALL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean times a sum": lambda rows, grid: rows.mean() * grid.prod(-1).sum(),
    "mean plus a sum": lambda rows, grid: rows.mean() + grid.prod(-1).sum(),
    "sum times a sum": lambda rows, grid: rows.sum() * grid.prod(-1).sum(),
    "sum over a sum": lambda rows, grid: rows.sum() / grid.prod(-1).sum(),
    "weighted by the samples": lambda rows, grid: (rows * grid.prod(-1)).sum() / grid.prod(-1).sum(),
    "mean over a greatest": lambda rows, grid: rows.mean() / grid.prod(-1).max(),
    "mean over a running sum": lambda rows, grid: rows.mean() / grid.prod(-1).cumsum(0)[-1],
}


class Weighs(nn.Module):
    """Reads the grids' values, and weighs the loss by what is made of those of all samples."""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.own, self.weigh = nn.Linear(WIDTH, WIDTH), weigh

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        """A loss."""
        _ = grid.prod(-1).tolist()
        return self.weigh(self.own(x).pow(2).mean((1, 2)), grid)


@pytest.mark.parametrize("name", OF_ALL)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_with_what_all_samples_grids_add_up_to_is_that_of_the_whole_batch(
    name: str, reduction: Literal["mean", "sum"]
) -> None:
    task = task_of(Weighs(OF_ALL[name]))
    task.reduction = reduction
    workload = workload_of(task)
    workload.operators = (nn.Linear,)
    graph = analysed(workload).tasks["t"]
    first = torch.utils.data.default_collate([task.dataset[index] for index in range(BATCH)])
    second = torch.utils.data.default_collate([task.dataset[index] for index in range(BATCH, 2 * BATCH)])
    cuts = {op.index: [0, 1, BATCH] for op in graph.ops}
    alone = run_cut(graph, [first], cuts).item()  # times a count, which is in float64
    assert alone == pytest.approx(run_plain(task, first).item(), rel=1e-5)
    together = (run_plain(task, first) + run_plain(task, second)).item()
    expected = together / 2 if reduction == "mean" else together
    assert run_cut(graph, [first, second], cuts).item() == pytest.approx(expected, rel=1e-5)
