"""Parameters whose optimizer state every device keeps whole, where others' is shared: level `none`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.account.device_memory import device_memory
from spindle_cli.account.step_end import collectives_of_step
from spindle_cli.account.types import Collective
from spindle_cli.check.run import check_plan
from spindle_cli.errors import NoPlanError
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile
from spindle_cli.program.link import link
from spindle_cli.program.proof.faults import ProgramError
from spindle_cli.program.proof.proof import prove
from spindle_cli.program.types import Kind, Program, StepSettings
from spindle_cli.simulate.run import simulate
from spindle_cli.units import MIB

NONE, OPTIMIZER = Sharding.NONE, Sharding.OPTIMIZER
SETTINGS = StepSettings(sharded=True, clips=False)


def profile() -> Profile:
    """Two components of one op each, of 64 and 32 MiB."""
    first = metaop_of("t/first", 1, {2: 1.0}, param_bytes_per_op=64 * MIB, parameters="first")
    then = metaop_of(
        "t/then", 1, {2: 1.0}, param_bytes_per_op=32 * MIB, parameters="then", inputs=("t/first",)
    )
    return profile_of(first, then).model_copy(
        update={"optimizer_state_sharded": True, "optimizer_s_per_byte": 1e-9}
    )


def planned(sharding: Mapping[str, Sharding]) -> Plan:
    return make_plan(profile(), cluster_of(2, memory_gib=16), effort=0, sharding=sharding)


def linked(sharding: Mapping[str, Sharding]) -> Program:
    found = link(planned(sharding), settings=SETTINGS)
    prove(found)
    return found


def test_a_plan_says_it_in_version_2_and_passes_check() -> None:
    plan = planned({"then": NONE, "first": OPTIMIZER})
    assert plan.sharding == {"then": NONE}
    assert plan.schema_ == "spindle.plan/2"
    assert check_plan(plan, profile()) == ()
    assert planned({"first": OPTIMIZER}).sharding == {}


def test_the_state_and_the_update_are_those_of_all_of_it() -> None:
    """State twice as large as the parameters: 64 MiB shared by two, and all of the 32."""
    for sharding, state, updated in (({}, 96, 48), ({"then": NONE}, 128, 64), ({"first": NONE}, 160, 80)):
        plan = planned(sharding)
        need = device_memory(plan.metaops, plan.slices, plan.cluster, plan)[0]
        assert need.optimizer_bytes == state * MIB
        assert need.updated_bytes == updated * MIB
        received = max(each.param_bytes_per_op for each in plan.metaops if each.parameters not in sharding)
        assert need.buffer_bytes == pytest.approx(
            received, rel=0.2
        )  # in the sum of its ranges; and 1 % of all
        assert need.gradient_bytes == need.parameter_bytes == 96 * MIB
        assert plan.predicted.optimizer_s == pytest.approx(updated * MIB * 1e-9, rel=0.01)


def test_its_sum_gives_each_device_all_and_nothing_is_gathered() -> None:
    program = linked({"then": NONE})
    whole, shared = program.groups  # the last op's gradients are complete first
    assert (whole.sharding, shared.sharding) == (NONE, OPTIMIZER)
    kinds = {
        (each.kind, each.group): each.rounds
        for each in collectives_of_step(program.plan, program.groups, sharded=True, clips=False, scales=False)
    }
    assert kinds[Collective.SUM, whole.index] == 2
    assert kinds[Collective.SUM, shared.index] == 1
    assert (Collective.GATHER, whole.index) not in kinds
    for actions in program.actions.values():
        assert [each.group for each in actions if each.kind is Kind.SUM] == [whole.index, shared.index]
        assert [each.group for each in actions if each.kind is Kind.GATHER] == [shared.index]
        assert sum(each.kind is Kind.FLAGS for each in actions) == 1


def test_where_all_is_whole_there_are_no_flags_and_no_gathers() -> None:
    program = linked({"then": NONE, "first": NONE})
    kinds = {each.kind for actions in program.actions.values() for each in actions}
    assert Kind.SUM in kinds
    assert kinds.isdisjoint({Kind.FLAGS, Kind.GATHER})
    found = collectives_of_step(program.plan, program.groups, sharded=True, clips=False, scales=False)
    assert {each.kind for each in found} == {Collective.LOSSES, Collective.SUM}


def test_small_sums_of_either_kind_are_not_joined() -> None:
    small = profile().model_copy(
        update={
            "metaops": tuple(each.model_copy(update={"param_bytes_per_op": 64}) for each in profile().metaops)
        }
    )
    cluster = cluster_of(2, memory_gib=16)
    for sharding, count in (({}, 1), ({"then": NONE}, 2)):
        assert len(link(make_plan(small, cluster, effort=0, sharding=sharding)).groups) == count


@pytest.mark.parametrize("kind", [Kind.GATHER, Kind.FLAGS])
def test_a_program_that_hands_on_what_each_device_has_is_refused(kind: Kind) -> None:
    program = linked({"then": NONE, "first": NONE})
    shared = linked({})
    (extra,) = [each for each in shared.actions[0] if each.kind is kind][:1]
    actions = {device: (*own, extra) for device, own in program.actions.items()}
    with pytest.raises(ProgramError):
        prove(replace(program, actions=actions))


def test_the_simulation_agrees_with_what_is_predicted() -> None:
    for sharding in ({"then": NONE}, {"then": NONE, "first": NONE}):
        plan = planned(sharding)
        assert simulate(plan).iteration_s == pytest.approx(plan.predicted.iteration_s, rel=0.02)


def test_nothing_need_be_said_where_all_state_is_whole() -> None:
    whole = profile().model_copy(update={"optimizer_state_sharded": False})
    plan = make_plan(whole, cluster_of(2, memory_gib=16), effort=0, sharding={"then": NONE})
    assert plan.sharding == {}


def test_what_does_not_fit_so_is_refused_and_not_shared_out() -> None:
    with pytest.raises(NoPlanError, match="with this sharding: none of then"):
        make_plan(profile(), cluster_of(2, memory_gib=0.3), effort=0, sharding={"then": NONE})
