"""Where a task runs that is only evaluated: by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from helpers.cut import cuttable
from helpers.plans import cluster_of, metaop_of, plan_of, profile_of, slice_of
from helpers.uneven import uneven_plan
from spindle_cli.errors import InputError
from spindle_cli.plan.types import Plan
from spindle_cli.program.evaluated import forward_only, place_evaluated
from spindle_cli.program.link import link
from spindle_cli.program.proof.proof import prove, prove_forward


@dataclass(frozen=True)
class Op:
    metaop: str
    position: int
    inputs: tuple[int, ...] = ()
    tensors: frozenset[str] = frozenset()
    is_whole: bool = False


@dataclass(frozen=True)
class MetaOp:
    name: str
    num_ops: int
    inputs: tuple[str, ...] = ()
    inputs_of_every_op: tuple[str, ...] = ()
    output_bytes: int = 10
    inner_output_bytes: int = 10


@dataclass(frozen=True)
class Needs:
    task: str
    batch_size: int
    metaops: Sequence[MetaOp]
    ops: Sequence[Op]
    held: Mapping[tuple[str, int], frozenset[str]] = field(default_factory=dict)


TOWER = metaop_of("train/tower", 3, {1: 2.0, 2: 1.0, 4: 0.5}, batch_size=8)
OTHER = metaop_of("train/other", 1, {1: 1.0, 2: 0.5, 4: 0.25}, batch_size=8)
HELD = {("train/tower", op): frozenset({f"tower.{op}"}) for op in range(3)}
HELD["train/other", 0] = frozenset({"head", "scale"})


def trained(other: tuple[int, ...] = (2, 3)) -> Plan:
    first, second = (
        slice_of(TOWER, (0, 2), (0, 1), 0.0),
        slice_of(TOWER, (2, 3), (3, 1, 2, 0), 2.0),
    )
    third = slice_of(OTHER, (0, 1), other, second.end_s)
    return plan_of(profile_of(TOWER, OTHER), cluster_of(4), [(first,), (second,), (third,)])


def needs(*loss: str, batch_size: int = 6, is_whole: bool = False) -> Needs:
    """A layer of its own, the tower, and a loss."""
    tower = [Op("e/tower", op, (op,), frozenset({f"tower.{op}"})) for op in range(3)]
    ops = (Op("e/own", 0), *tower, Op("e/loss", 0, (3,), frozenset(loss), is_whole=is_whole))
    metaops = (
        MetaOp("e/own", 1),
        MetaOp("e/tower", 3, ("e/own",)),
        MetaOp("e/loss", 1, ("e/tower",)),
    )
    return Needs("e", batch_size, metaops, ops, HELD)


def places(plan: Plan) -> list[tuple[str, tuple[int, int], tuple[int, ...], int]]:
    return [(piece.metaop, piece.ops, piece.devices, piece.dp) for piece in plan.slices]


def test_ops_go_where_what_they_take_is_trained_and_others_where_they_are_taken() -> None:
    plan = place_evaluated(trained(), needs("head"))
    assert places(plan) == [
        ("e/own", (0, 1), (0, 1), 2),
        ("e/tower", (0, 2), (0, 1), 2),
        ("e/tower", (2, 3), (3, 1, 2), 3),  # six samples are not four equal shares
        ("e/loss", (0, 1), (2, 3), 2),
    ]
    program = link(plan, {(metaop.name, op): () for metaop in plan.metaops for op in range(metaop.num_ops)})
    prove(program)
    prove_forward(forward_only(program, "e"), program, "e")


def test_a_loss_that_takes_nothing_trained_stays_where_its_input_is() -> None:
    assert places(place_evaluated(trained(), needs()))[-1] == ("e/loss", (0, 1), (3, 1, 2), 3)


def test_what_needs_the_whole_batch_has_one_device() -> None:
    assert places(place_evaluated(trained(), needs("head", is_whole=True)))[-1] == ("e/loss", (0, 1), (2,), 1)


def test_seconds_are_those_of_the_trained_op_by_sample() -> None:
    plan = place_evaluated(trained(), needs("head"))
    trained_s = TOWER.curve[1].forward_s  # two devices, four samples each
    assert plan.by_name["e/tower"].curve[0].forward_s == pytest.approx(trained_s / 4 * 3)
    assert plan.by_name["e/own"].curve[0].forward_s == 0.0


def test_a_plan_of_version_2_with_unequal_shares_has_a_place_for_it_too() -> None:
    """8 samples in two micro-batches of 3 and 1: an op of 3 samples takes 0.9 s, a third of that forward."""
    tower = cuttable("train/tower", 3, {8: 2.0, 3: 0.9})
    plan = uneven_plan(tower, (0, 3, 4), micro_batches=2)
    assert plan.schema_ == "spindle.plan/2" and plan.slices[0].rows == (0, 3, 4)
    found = place_evaluated(plan, needs())
    assert places(found)[1] == ("e/tower", (0, 3), (0, 1), 2)
    assert found.by_name["e/tower"].curve[0].forward_s == pytest.approx(0.3 / 3 * 3)
    prove(link(found, {(metaop.name, op): () for metaop in found.metaops for op in range(metaop.num_ops)}))


def test_an_op_goes_to_the_devices_that_have_all_it_takes_of_several_ops() -> None:
    plan = place_evaluated(trained(), needs("head", "tower.2"))
    assert places(plan)[-1] == ("e/loss", (0, 1), (2, 3), 2)


def test_what_no_device_has_is_refused() -> None:
    with pytest.raises(InputError, match=r"task 'e'.*no device has all that op 0 of e/loss.*head, tower\.0"):
        place_evaluated(trained(), needs("head", "tower.0"))


def test_it_runs_where_its_input_is_if_that_is_one_of_several_places() -> None:
    """The same parameters in two slices: the second is where the input comes from."""
    held = {**HELD, ("train/other", 0): frozenset({"tower.2"})}
    given = needs("tower.2")
    given = Needs(given.task, given.batch_size, given.metaops, given.ops[:3] + given.ops[4:], held)
    ops = (*given.ops[:3], Op("e/loss", 0, (2,), frozenset({"tower.2"})))
    shorter = (given.metaops[0], MetaOp("e/tower", 2, ("e/own",)), given.metaops[2])
    plan = place_evaluated(trained(other=(0, 1)), Needs("e", 6, shorter, ops, held))
    assert places(plan)[-1] == ("e/loss", (0, 1), (0, 1), 2)


SPLIT = metaop_of("train/split", 1, {4: 0.5}, batch_size=8)
SPLIT = SPLIT.model_copy(update={"curve": (SPLIT.curve[0].model_copy(update={"dp": 2, "tp": 2}),)})


def of_split(*tensors: str, batch_size: int = 6, held: str = "w") -> Plan:
    """An op of these tensors and a loss of none; `w` is in two shares of two devices, `held` on 2 and 3."""
    split = slice_of(SPLIT, (0, 1), (0, 1, 2, 3), 0.0, tp=2)
    other = slice_of(OTHER, (0, 1), (2, 3), split.end_s)
    plan = plan_of(profile_of(SPLIT, OTHER), cluster_of(4), [(split,), (other,)])
    ops = (Op("e/op", 0, (), frozenset(tensors)), Op("e/loss", 0, (0,)))
    known = {("train/split", 0): frozenset({"w"}), ("train/other", 0): frozenset({held})}
    metaops = (MetaOp("e/op", 1), MetaOp("e/loss", 1, ("e/op",)))
    return place_evaluated(plan, Needs("e", batch_size, metaops, ops, known))


def test_an_op_of_split_parameters_runs_on_whole_groups_and_what_is_not_split_on_one_of_each() -> None:
    even = of_split("w", held="v")
    assert places(even) == [("e/op", (0, 1), (0, 1, 2, 3), 2), ("e/loss", (0, 1), (0, 2), 2)]
    assert [piece.tp for piece in even.slices] == [2, 1]
    odd = of_split("w", batch_size=3, held="v")
    assert [(piece.devices, piece.dp, piece.tp) for piece in odd.slices] == [((0, 1), 1, 2), ((0,), 1, 1)]


def test_it_goes_rather_where_parameters_are_whole() -> None:
    found = of_split("w", held="w")
    assert [(piece.devices, piece.tp) for piece in found.slices] == [((2, 3), 1), ((2, 3), 1)]


def test_fragments_of_one_op_are_of_no_use_to_what_takes_several_ops() -> None:
    with pytest.raises(InputError, match="no device has all that op 0 of e/op takes of trained tasks: v, w"):
        of_split("v", "w", held="v")
