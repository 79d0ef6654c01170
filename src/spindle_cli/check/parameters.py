"""Rules of parameters that a plan says something of one by one: matrices whose gradients are gathered as what
they are made of, and what ops of several keys use.
"""

from __future__ import annotations

from collections.abc import Iterator

from spindle_cli.account.groups import gathered_matrices
from spindle_cli.check.types import Violation, place_of
from spindle_cli.costs.memory import parameter_block
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Matrix, TiedParameters


def matrices_are_gathered_alike(plan: Plan) -> Iterator[Violation]:
    """All ops that use a gathered matrix say the same of it; its devices have all of it, and round alike."""
    first_by_name: dict[str, Matrix] = {}
    for metaop in plan.metaops:
        for place, matrix in enumerate(metaop.gathered):
            where = f"metaops, {metaop.name}.gathered[{place}]"
            if matrix.op >= metaop.num_ops:
                yield Violation(
                    rule="gathered",
                    where=where,
                    value=f"op {matrix.op}",
                    expected=f"one of its {metaop.num_ops} ops, counted from 0",
                )
            first = first_by_name.setdefault(matrix.parameter, matrix)
            said, meant = ((use.way, use.outputs, use.inputs) for use in (matrix, first))
            if said != meant:
                yield Violation(
                    rule="gathered",
                    where=where,
                    value=f"{matrix.parameter!r} by {said[0]}, {said[1]} x {said[2]}",
                    expected=f"by {meant[0]}, {meant[1]} x {meant[2]}, as another op says",
                )


def gathered_matrices_are_whole(plan: Plan) -> Iterator[Violation]:
    """No slice splits a gathered matrix, and its devices are of one type, as each of them steps it; of a plan
    whose slices are sound.
    """
    for wave in plan.waves:
        for slice_ in wave.slices:
            for matrix in plan.by_name[slice_.metaop].gathered:
                if slice_.tp > 1 and slice_.ops[0] <= matrix.op < slice_.ops[1]:
                    yield Violation(
                        rule="gathered",
                        where=place_of(wave.index, slice_),
                        value=f"tp {slice_.tp}, with {matrix.parameter!r} gathered by {matrix.way}",
                        expected="tp 1",
                    )
    for name, gathered in gathered_matrices(plan.slices, plan.by_name, plan.accumulate).items():
        types = sorted({plan.cluster.type_of[device] for device in gathered.devices})
        if len(types) > 1 and not plan.cluster.is_cpu:
            yield Violation(
                rule="gathered",
                where=f"metaops, {name!r}",
                devices=gathered.devices,
                value=f"gathered by devices of {', '.join(types)}, each of which steps it",
                expected="devices of one type, as types round differently",
            )


def copies_are_of_one_type(plan: Plan) -> Iterator[Violation]:
    """Devices that each update their own copy of parameters are of one type, as types round differently: the
    copies would drift apart.
    """
    if not plan.cluster.is_mixed or plan.cluster.is_cpu:
        return
    holders: dict[str, set[int]] = {}
    for slice_ in plan.slices:
        metaop = plan.by_name[slice_.metaop]
        key = parameter_block(metaop, slice_.ops[0])[0]
        if metaop.trainable_fraction and not _is_updated_once(plan, key):
            holders.setdefault(key, set()).update(slice_.devices)
    for key, devices in holders.items():
        types = sorted({plan.cluster.type_of[device] for device in devices})
        if len(types) > 1:
            yield Violation(
                rule="copies",
                where=f"metaops, parameters {key!r}",
                devices=tuple(sorted(devices)),
                value=f"updated by each of its devices, of {', '.join(types)}",
                expected="optimizer_state_sharded: true, so that one device updates each, or devices of one "
                "type, as types round differently",
            )


def _is_updated_once(plan: Plan, key: str) -> bool:
    """Whether one device updates each parameter of a key, and hands it on."""
    return plan.optimizer_state_sharded and plan.sharding.get(key) is not Sharding.NONE


def tied_parameters_are_said_alike(plan: Plan) -> Iterator[Violation]:
    """All ops that use parameters with ops of other keys say the same of them, theirs among the keys."""
    uses = list(_uses_of_tied(plan))
    split = {tied.parameter for tied, _, _ in uses if tied.is_split}
    users = {(tied.parameter, key) for tied, key, _ in uses}
    keys = {parameter_block(metaop, 0)[0] for metaop in plan.metaops}
    first: dict[tuple[str, str], object] = {}
    for tied, key, where in uses:
        name, is_split = tied.parameter, tied.parameter in split
        if key not in tied.keys:
            of_keys = f"{name!r} of keys {', '.join(tied.keys)}"
            yield _tied(where, of_keys, f"{key!r} among them, as this op uses it")
        for other_key in tied.keys:
            if other_key in keys and (name, other_key) not in users:
                none = "an op with this key that says the same of it; none does"
                yield _tied(where, f"{name!r} of key {other_key!r}", none)
        for what in ("num_bytes", "keys", "is_trained"):
            said = getattr(tied, what)
            meant = first.setdefault((name, what), said)
            if said != meant:
                yield _tied(
                    where, f"{name!r} with {what} {_said(said)}", f"{_said(meant)}, as another op says"
                )
        if tied.is_split_by_any != is_split:
            value = f"{name!r} with is_split_by_any {_said(tied.is_split_by_any)}"
            yield _tied(where, value, f"{_said(is_split)}: whether is_split of any op that uses it is true")


def _uses_of_tied(plan: Plan) -> Iterator[tuple[TiedParameters, str, str]]:
    """Each op's entry for parameters that ops of other keys use too, the op's own key, and where it is."""
    for metaop in plan.metaops:
        for place, tied in enumerate(metaop.tied):
            yield tied, parameter_block(metaop, tied.op)[0], f"metaops, {metaop.name}.tied[{place}]"


def _tied(where: str, value: str, expected: str) -> Violation:
    return Violation(rule="tied", where=where, value=value, expected=expected)


def _said(value: object) -> str:
    """Writes a value as a plan file has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(value) if isinstance(value, tuple) else str(value)
