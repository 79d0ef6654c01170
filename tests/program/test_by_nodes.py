"""Programs whose sums go inside of nodes first, and then between them: what they post over which
communicators, and what the proof refuses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.little_executor import Rules, execute
from helpers.plans import metaop_of, plan_of, profile_of, slice_of
from spindle_cli.account.traffic import traffic_of
from spindle_cli.account.types import Purpose
from spindle_cli.costs.links import Spread, by_node_s
from spindle_cli.files.cluster import Cluster, Link, Links, NodeGroup
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.make import make_plan
from spindle_cli.program.clock import PassClock
from spindle_cli.program.link import link
from spindle_cli.program.proof.faults import ProgramError
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.proof.proof_moves import Moves
from spindle_cli.program.sum_times import parameters_there
from spindle_cli.program.types import Kind, Program, StepSettings
from spindle_cli.simulate.engine import Engine
from spindle_cli.simulate.run import simulate

DEVICES = (0, 1, 2, 3)
NODES, ACROSS = ((0, 1), (2, 3)), ((0, 2), (1, 3))


@pytest.fixture(scope="module")
def program() -> Program:
    """A net of two ops over two nodes of two GPUs with a card each, between which links are slow."""
    links = Links(
        intra_node=Link(latency_us=5, bandwidth_gb_per_s=100),
        inter_node=Link(latency_us=10, bandwidth_gb_per_s=1),
    )
    nodes = (NodeGroup(count=2, devices=2, device="a800-80gb", memory_gib=80, nics=1),)
    net = metaop_of("a/net", 2, {4: 1.0}, param_bytes_per_op=2**26)
    plan = plan_of(
        profile_of(net),
        Cluster(name="slow", nodes=nodes, links=links),
        [[slice_of(net, (0, 2), DEVICES, 0.0)]],
    )
    return link(plan, settings=StepSettings(sharded=True))


def test_a_program_is_proved_and_runs_to_its_end(program: Program) -> None:
    assert {group.nodes for group in program.groups} == {NODES}
    assert {each.ranks for each in program.communicators if each.purpose is Purpose.SUMS} == {*NODES, *ACROSS}
    prove(program)
    for rules in Rules:
        execute(program, rules)


def test_sums_go_inside_first_and_gathers_between(program: Program) -> None:
    for device in DEVICES:
        inside, across = (next(part for part in parts if device in part) for parts in (NODES, ACROSS))
        moves = [move for move in Moves(program).of(device) if move.posts is not None]
        over: dict[Kind, list[tuple[int, ...]]] = {}
        for move in moves:
            kind = program.actions[device][move.step].kind
            over.setdefault(kind, []).append(program.communicators[move.communicator].ranks)
        assert over[Kind.SUM] == [inside, across] * len(program.groups)
        assert over[Kind.GATHER] == [across, inside] * len(program.groups)
        assert over[Kind.FLAGS] == over[Kind.LOSSES] == [DEVICES]


def test_what_is_summed_whole_goes_over_all_devices_at_once(program: Program) -> None:
    groups = tuple(replace(group, sums_whole=True) for group in program.groups)
    whole = replace(program, groups=groups)
    prove(whole)
    moves = [move for move in Moves(whole).of(0) if move.posts is not None]
    kinds = [(whole.actions[0][move.step].kind, len(move.members)) for move in moves]
    assert (Kind.SUM, 4) in kinds and (Kind.SUM, 2) not in kinds and (Kind.GATHER, 2) in kinds


def test_a_step_waits_for_the_last_of_both(program: Program) -> None:
    """The optimizer takes what goes between nodes, too."""
    (step,) = (move for move in Moves(program).of(0) if program.actions[0][move.step].kind is Kind.STEP)
    posted = [move.posts for move in Moves(program).of(0) if move.posts is not None]
    gathers = 2 * len(program.groups)
    assert set(step.waits_for) == set(posted[:-gathers])


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a device that is not in any": ({"nodes": ((0, 1), (2, 2))}, "is of devices"),
    "nodes of several": ({"nodes": ((0, 2), (1, 3))}, "does not go by nodes evenly"),
    "one alone": ({"nodes": ((0, 1, 2, 3),)}, "does not go by nodes evenly"),
    "uneven ones": ({"nodes": ((0,), (1,), (2, 3))}, "does not go by nodes evenly"),
    "what is kept whole": ({"sharding": Sharding.NONE}, "is not summed once in equal ranges"),
    "what passes sum": ({"sharding": Sharding.GRADIENTS}, "starts SUM 0, or should and does not"),
    "unequal ranges": ({"weights": (1, 2, 1, 1)}, "is not summed once in equal ranges"),
    "nodes of one device each": ({"nodes": ((0,), (1,), (2,), (3,))}, "have no communicator"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_proof_refuses_what_cannot_go_by_nodes(name: str, program: Program) -> None:
    changes, message = CHANGES[name]
    changed = replace(program, groups=(replace(program.groups[0], **changes), *program.groups[1:]))
    with pytest.raises(ProgramError, match=message):
        prove(changed)


def test_sums_in_other_orders_inside_of_a_node_are_refused(program: Program) -> None:
    sums = [step for step, action in enumerate(program.actions[1]) if action.kind is Kind.SUM]
    actions = list(program.actions[1])
    first, second = sums[0], sums[1]
    actions[first], actions[second] = (
        replace(actions[second], op=actions[first].op),
        replace(actions[first], op=actions[second].op),
    )
    with pytest.raises(ProgramError):
        prove(replace(program, actions={**program.actions, 1: tuple(actions)}))


def test_it_is_simulated_as_fast_as_nodes_allow(program: Program) -> None:
    """64 MiB an op: half of it crosses, over both cards of a node at once, and half goes around inside."""
    found = Engine(program).run()
    sums = [each for each in found.collected if each.kind.value == "sum"]
    num_bytes = sums[0].num_bytes
    expected_s = 5e-6 + num_bytes / 2 / 100e9 + 10e-6 + num_bytes / 2 / 1e9
    assert min(each.end_s - each.start_s for each in sums) == pytest.approx(expected_s, rel=1e-3)


def test_parameters_are_there_when_they_have_been_gathered_by_nodes(program: Program) -> None:
    """Both ops' parameters are needed at once, by passes of no length to speak of."""
    times = {(kind, 0): (0, 1) for kind in (Kind.FORWARD, Kind.BACKWARD)}
    there = parameters_there(program.groups, PassClock(times, forward_ended=1), program.plan)
    gathered = sum(
        by_node_s(group.parameter_bytes, Spread((2, 2)), program.plan.cluster) for group in program.groups
    )
    assert there == {0: pytest.approx(gathered * 2e9, rel=1e-6)}


def test_an_iteration_is_predicted_as_it_is_simulated(program: Program) -> None:
    """By ones that sums and gathers take most of."""
    net = metaop_of("a/net", 2, {4: 0.01}, param_bytes_per_op=2**26)
    settings = {"optimizer_state_sharded": True}
    plan = make_plan(profile_of(net).model_copy(update=settings), program.plan.cluster, "sequential")
    found = simulate(plan)
    assert {each.by_node for each in traffic_of(plan).collectives if each.group is not None} == {True}
    assert found.iteration_s == pytest.approx(plan.predicted.iteration_s, rel=0.02)
    assert plan.predicted.gradient_sum_s > 0.5 * plan.predicted.iteration_s
