"""Layers split by tensor parallelism train the model of a plain loop, mixed as the plan likes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mixed_cases
import pytest
import torch
from case_runs import Case, captured, dtype_of, marked
from plain_loop import PlainRun, train_plainly
from safetensors.torch import load_file
from split_cases import (
    BY_CHANCE,
    BY_CHANCE_RECOMPUTED,
    EXACT,
    GONE_ON,
    GONE_ON_ELSEWHERE,
    IN_PARTS,
    SAVED,
    SPLIT,
    UNDISTURBED,
)
from test_training_is_exact import TOLERANCE, close
from torch import Tensor

from helpers.analysed import analysed
from spindle_cli.account.activations import WHOLE
from spindle_cli.files.request import CaptureStage
from spindle_cli.files.run_files import model_path, read_metrics
from spindle_cli.files.tensors import parse_key
from spindle_cli.plan.file import read_plan
from spindle_cli.program.link import link
from spindle_cli.workload.building.load import load
from spindle_cli.workload.graph import ParameterTable

pytestmark = pytest.mark.processes

Expected = dict[str, Tensor]


def pairs(folder: Path, stage: CaptureStage, whole: Expected) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of every rank: what it holds of each tensor, and the same part of the expected one."""
    for rank, held in enumerate(captured(folder, stage, 4)):
        for key, tensor in held.items():
            name, part = parse_key(key)
            expected = whole[name]
            if part is not None:
                expected = expected.narrow(part.dim, part.first, part.last - part.first)
            yield f"{key} on rank {rank}", tensor, expected


def plain_run(folder: Path, case: Case) -> PlainRun:
    return train_plainly(str(folder / case.name / "workload.yaml"), case.steps, dtype_of(case))


def check_split_against(plain: PlainRun, case: Case, folder: Path) -> None:
    """A run of four workers that hold fragments is that of a plain loop."""
    tolerance = TOLERANCE[case.dtype]
    for line, expected in zip(read_metrics(folder), plain.losses, strict=True):
        assert line.task_losses == pytest.approx(expected, rel=tolerance)
    found = {parse_key(key)[0] for rank in captured(folder, "gradients", 4) for key in rank}
    assert found == set(plain.gradients)
    for what, tensor, expectation in pairs(folder, "gradients", plain.gradients):
        assert close(tensor, expectation, tolerance), what
    for what, tensor, expectation in pairs(folder, "final", plain.final):
        assert close(tensor, expectation, tolerance), what


@pytest.mark.parametrize("case", IN_PARTS, ids=lambda case: case.name)
def test_groups_that_gather_what_they_are_sent_in_parts_train_it_too(
    case: Case, four_split_workers: Path
) -> None:
    """Activations and gradients, of shares that come from one device and of shares that come from two."""
    folder = four_split_workers / case.name
    transfers = {
        action.transfer
        for actions in link(read_plan(folder / "plan.yaml")).actions.values()
        for action in actions
        if action.transfer is not None and action.transfer.part != WHOLE
    }
    assert {transfer.is_gradient for transfer in transfers} == {True, False}
    check_split_against(plain_run(four_split_workers, case), case, folder)


@pytest.mark.parametrize("case", marked(EXACT))
def test_split_layers_train_the_model_of_a_plain_loop(case: Case, four_split_workers: Path) -> None:
    check_split_against(plain_run(four_split_workers, case), case, four_split_workers / case.name)


def test_batches_of_several_lengths_train_the_model_of_a_plain_loop(four_split_workers: Path) -> None:
    """With all that a plan may do to them."""
    case = mixed_cases.MIXED
    check_split_against(plain_run(four_split_workers, case), case, four_split_workers / case.name)


def test_sampled_steps_of_several_lengths_go_on_by_another_plan(four_split_workers: Path) -> None:
    """Streams, layers that are split before and not behind, and a checkpoint between steps of a task."""
    case = mixed_cases.GONE_ON
    plain = plain_run(four_split_workers, case)
    lines = list(read_metrics(four_split_workers / mixed_cases.SAVED.name))
    assert [line.task_losses for line in lines] == [pytest.approx(each, rel=1e-10) for each in plain.losses]
    for what, tensor, expectation in pairs(four_split_workers / case.name, "final", plain.final):
        assert close(tensor, expectation, 1e-10), what


def test_fragments_start_with_the_plain_models_values_bit_for_bit(four_split_workers: Path) -> None:
    folder = four_split_workers / "split"
    table = ParameterTable.of(analysed(load(str(folder / "workload.yaml")).workload))
    plain = {name: parameter.detach() for name, parameter in table.parameters.items()}
    assert all(torch.equal(found, expected) for _, found, expected in pairs(folder, "initial", plain))


def test_a_rank_holds_each_fragment_that_its_slices_need_once(four_split_workers: Path) -> None:
    """The tower's last layer is cut in four: every rank has a half of it for one task, and for the other a
    quarter, of the same half or not.
    """
    key = "left.tower.blocks.2.up.weight"
    held = captured(four_split_workers / "split", "initial", 4)
    found = [sorted(k.removeprefix(key) for k in rank if k.startswith(key)) for rank in held]
    first, second = ["[0:4]", "[4:8]"], ["[12:16]", "[8:12]"]
    # left/tower on (3, 1, 0, 2) by 2: ranks 3 and 0 have the first half; right/tower on (0, 1, 2, 3) by 4.
    assert found == [first, sorted({*second, "[4:8]"}), second, sorted({*first, "[12:16]"})]
    norms = [[k for k in rank if k.startswith("left.tower.blocks.2.norm")] for rank in held]
    assert all(len(rank) == 2 for rank in norms)
    assert SPLIT[3][3:] == (4,)


def test_by_the_same_plan_it_goes_on_bit_for_bit(four_split_workers: Path) -> None:
    ends = [captured(four_split_workers / case.name, "final", 4) for case in (UNDISTURBED, GONE_ON)]
    for expected, found in zip(*ends, strict=True):
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("case", marked(GONE_ON_ELSEWHERE))
def test_by_other_degrees_it_goes_on_to_float_tolerance(case: Case, four_split_workers: Path) -> None:
    plain = plain_run(four_split_workers, case)
    for what, tensor, expectation in pairs(four_split_workers / case.name, "final", plain.final):
        assert close(tensor, expectation, 1e-10), what


def test_the_saved_model_and_the_frozen_weights_are_whole(four_split_workers: Path) -> None:
    plain = plain_run(four_split_workers, UNDISTURBED)
    saved = load_file(model_path(four_split_workers / SAVED.name, 3))
    frozen = load_file(four_split_workers / SAVED.name / "checkpoints" / "frozen.safetensors")
    saved |= {name.removeprefix("model."): tensor for name, tensor in frozen.items()}
    assert saved.keys() == plain.final.keys()
    assert all(close(tensor, plain.final[name], 1e-10) for name, tensor in saved.items())


def test_copies_stay_equal_under_dropout_and_recomputation_draws_the_same(four_split_workers: Path) -> None:
    ends = [
        captured(four_split_workers / case.name, "final", 4) for case in (BY_CHANCE, BY_CHANCE_RECOMPUTED)
    ]
    copies: dict[str, Tensor] = {}
    for once, again in zip(*ends, strict=True):
        for key, tensor in once.items():
            assert torch.equal(copies.setdefault(key, tensor), tensor), key
            assert torch.equal(again[key], tensor), key
