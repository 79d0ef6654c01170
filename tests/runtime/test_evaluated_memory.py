"""What is only evaluated is counted where it is held, and refused where no memory is left for it."""

from __future__ import annotations

from functools import cache

import eval_toys
import only_evaluated_toys
import pytest
from hand_plans import place, whole

from helpers.analysed import analysed
from spindle_cli.analysis.evaluation import needs_of
from spindle_cli.errors import InputError
from spindle_cli.launch.run import held_for_evaluations, require_room
from spindle_cli.plan.types import Plan
from spindle_cli.program.evaluated import place_evaluated
from spindle_cli.workload.graph import WorkloadGraph

OFFSET, HEAD = eval_toys.WIDTH, (eval_toys.WIDTH + 1) * eval_toys.CLASSES  # numbers of `probe` alone


@cache
def graph() -> WorkloadGraph:
    return analysed(only_evaluated_toys.build(), evaluates=True)


def plan_on(*devices: int) -> Plan:
    return place(graph(), 3, whole(graph(), devices))


def test_a_tasks_own_parameters_count_on_every_device_that_runs_their_op() -> None:
    plan = plan_on(2, 0)
    held = held_for_evaluations(plan, graph())
    assert held["across"] == (0, 0, 0)  # all that it takes is trained
    pieces = place_evaluated(plan, needs_of(graph(), "probe")).slices
    expected = [0, 0, 0]
    for piece in pieces:
        numbers = OFFSET * (piece.metaop == pieces[0].metaop) + HEAD * (piece is pieces[-1])
        for device in piece.devices:
            expected[device] += 4 * numbers
    assert held["probe"] == tuple(expected)
    assert sum(expected) >= 4 * (OFFSET + HEAD)


def test_in_narrow_numbers_they_take_half() -> None:
    plan = plan_on(1)
    whole_numbers = held_for_evaluations(plan, graph())["probe"]
    assert held_for_evaluations(plan, graph(), 2)["probe"] == tuple(each // 2 for each in whole_numbers)


def test_what_has_no_room_is_refused_at_the_first_byte_beyond() -> None:
    plan = plan_on(1)
    room = plan.cluster.memory_bytes[1] - plan.predicted.peak_memory_bytes[1]
    assert require_room(plan, {"probe": (0, room, 0)}, "p.yaml")
    with pytest.raises(InputError, match=r"p.yaml: device 1 needs .* more for .* evaluated \(probe, other\)"):
        require_room(plan, {"probe": (0, room - 1, 0), "other": (0, 2, 0)}, "p.yaml")


def test_without_such_tasks_nothing_is_said() -> None:
    assert held_for_evaluations(plan_on(1), analysed(eval_toys.build(), evaluates=True)) == {}
    assert require_room(plan_on(1), {}, "p.yaml") == ()
