"""Batch norms over shares on four workers by `verify`'s comparisons, and what a plan must say of them."""

from __future__ import annotations

from pathlib import Path

import norm_toys
import pytest
import torch
from case_runs import Case, marked, prepare
from hand_plans import place
from norm_cases import NORMED, SPREAD

from helpers.analysed import analysed
from spindle_cli.errors import InputError
from spindle_cli.files.request import RunRequest
from spindle_cli.operators.batch_dependent import OverShares
from spindle_cli.runtime.part.localise import localise
from spindle_cli.runtime.step.compute import LocalSlice
from spindle_cli.verify import plain
from spindle_cli.verify.comparing.captured import open_run
from spindle_cli.verify.comparing.parameters import compare_buffers, compare_final


@pytest.mark.processes
@pytest.mark.parametrize("case", marked(NORMED))
def test_statistics_are_those_of_plain_pytorch_on_every_worker(
    case: Case, four_workers: Path, tmp_path: Path
) -> None:
    request = RunRequest.read(four_workers / case.name / "request.json")
    plain.train(request.model_copy(update={"run_dir": tmp_path, "capture_dir": tmp_path}))
    with open_run(four_workers / case.name, 4) as ours, open_run(tmp_path, 1) as theirs:
        buffers = compare_buffers(ours, theirs, 1e-12)
        final = compare_final(ours, theirs, (), 1e-12)[0]
        copies = sum(len(holders) for holders in ours.final_buffers.holders.values())
        moved = {
            name
            for name in theirs.final_buffers.holders
            if not torch.equal(theirs.initial_buffers.first(name), theirs.final_buffers.first(name))
        }
    assert buffers.passed, buffers
    assert final.passed, final
    assert buffers.compared == copies > 2 * len(moved), "several workers hold a norm"
    assert not any("frozen" in name for name in moved)
    assert {"few.norm.running_mean", "many.blocks.1.norm.num_batches_tracked"} <= moved


def slices_on(rank: int, folder: Path, *, says_sums: bool = True) -> dict[int, LocalSlice]:
    """What a rank builds of the first case; `says_sums`: as the plan does of its batch norms."""
    case = NORMED[0]
    request = prepare(case, 4, folder / "run")
    plan = place(analysed(norm_toys.build()), 4, SPREAD)
    if not says_sums:
        metaops = tuple(metaop.model_copy(update={"batch_sums": ()}) for metaop in plan.metaops)
        plan = plan.model_copy(update={"metaops": metaops})
    return localise(request, plan, rank, torch.device("cpu")).slices


def test_ops_of_several_shares_sum_over_their_slices_devices(tmp_path: Path) -> None:
    for local in slices_on(3, tmp_path).values():
        devices = local.wired.slice.devices
        assert (local.shares is None) == (len(devices) == 1)
        if local.shares is not None:
            assert local.shares.ranks == devices
            assert local.shares.member == devices.index(3)
            assert all(isinstance(op, OverShares) for op in local.runnable)


def test_a_plan_that_says_nothing_of_their_sums_is_refused_at_the_first_one(tmp_path: Path) -> None:
    (local,) = (
        local
        for local in slices_on(3, tmp_path, says_sums=False).values()
        if local.wired.slice.label == "many/reduce[0:1]"
    )
    specs = [*(local.wired.task.fields[name] for name in local.wired.fields), *local.wired.inputs]
    arguments = [torch.zeros(3, *spec.shape[1:], dtype=spec.dtype) for spec in specs]
    said = (
        r"many/reduce\[0:1\]: its batch norms sum 13 numbers over its devices, of which the plan says nothing"
    )
    with pytest.raises(InputError, match=said):
        local.runnable[0](*arguments, 1.0, torch.ones(()))
