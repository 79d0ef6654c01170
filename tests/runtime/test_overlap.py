"""Gradient sums start while their slice still runs backward, in the program's order, and not too early."""

from __future__ import annotations

import torch
from case_runs import HERE
from hand_plans import place, whole

from helpers.analysed import analysed
from spindle_cli.program.link import link
from spindle_cli.program.types import Action, Kind
from spindle_cli.runtime.communication.wiring import wire
from spindle_cli.runtime.step.compute import LocalSlice, run_backward, run_forward
from spindle_cli.runtime.step.executor import SumStarter
from spindle_cli.training.batches import Batches
from spindle_cli.workload.building.load import load


def sum_of(group: int, op: int) -> Action:
    return Action(Kind.SUM, group=group, op=op)


def test_sums_start_in_order_each_when_its_op_is_through() -> None:
    actions = [
        Action(Kind.BACKWARD, slice_index=7),
        sum_of(0, 3),
        sum_of(1, 1),
        sum_of(2, 1),
        Action(Kind.BACKWARD, slice_index=4),
        sum_of(3, 0),
        Action(Kind.STEP),
    ]
    started: list[int] = []
    starter = SumStarter(actions, started.append)
    watched = starter.watched(7)
    assert set(watched) == {3, 1}
    starter.begin(7)
    watched[3]()
    assert started == [0]
    watched[1]()
    assert started == [0, 1, 2]
    for action in actions[1:4]:
        starter.reach(action)
    starter.begin(4)
    starter.reach(actions[5])
    assert started == [0, 1, 2, 3]


def test_a_sum_that_its_op_did_not_start_starts_where_the_program_says() -> None:
    actions = [Action(Kind.BACKWARD, slice_index=0), sum_of(0, 2), sum_of(1, 0)]
    started: list[int] = []
    starter = SumStarter(actions, started.append)
    for _ in range(2):
        starter.begin(0)
        starter.reach(actions[1])
        starter.reach(actions[2])
    assert started == [0, 1, 0, 1]


def test_when_an_op_is_through_it_and_all_after_it_have_their_gradients_and_no_others() -> None:
    graph = analysed(load(f"{HERE / 'runtime_toys.py'}:build").workload)
    program = link(place(graph, 1, whole(graph, (0,))))
    wired = next(wired for wired in wire(graph, program).slices if wired.slice.metaop == "pairs/vision")
    modules = tuple(wired.task.op_module(op) for op in wired.ops)
    local = LocalSlice(wired, modules, modules, (0, 8), None)
    linears = [wired.task.root.get_parameter(f"vision.blocks.{op}.linear.weight") for op in range(4)]
    with_gradient: dict[int, list[bool]] = {}

    def note(op: int) -> None:
        with_gradient[op] = [weight.grad is not None for weight in linears]

    batch = Batches(wired.task.task, seed=0).rows(0, 0, 8, wired.fields)
    run = run_forward(local, batch, {}, {op: lambda op=op: note(op) for op in range(4)}, lambda op: None)
    (output,) = run.outputs.values()
    run_backward(run, {name: torch.ones_like(value) for name, value in run.outputs.items()}, 1.0)
    assert output.grad_fn is not None
    assert with_gradient == {
        3: [False, False, False, True],
        2: [False, False, True, True],
        1: [False, True, True, True],
    }
