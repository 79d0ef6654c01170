"""Rules of plans for several types of device: whose times count, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import run_spindle
from helpers.plans import cluster_of
from helpers.random_plans import plan_on
from helpers.several_types import cluster_of_types, metaop_on_types, plan_in_rows, profile_on_types
from spindle_cli.check.run import check_plan
from spindle_cli.check.types import Violation
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.types import Plan, PlanMetaOp, Slice
from spindle_cli.profile.types import Matrix, MetaOpProfile, Profile, ShareTime

# A second a sample on one, two on the other; the slower one is the first that the cluster has.
NET = metaop_on_types("t/net", 1, {"slow": 2.0, "fast": 1.0}, batch_size=6)
PROFILE = profile_on_types(NET)


def against(plan: Plan, profile: Profile) -> list[Violation]:
    """What is wrong with a plan that does not know its profile's hash."""
    return [each for each in check_plan(plan, profile) if each.rule != "profile"]


def changed(plan: Plan, metaop: dict[str, Any] | None = None, **piece: Any) -> Plan:
    """With other keys of its one MetaOp, or its one slice."""
    (old,) = plan.slices
    metaops = tuple(each.model_copy(update=metaop or {}) for each in plan.metaops)
    return plan_on(plan.cluster, metaops, [old.model_copy(update=piece)])


def lasting(plan: Plan, seconds: float) -> Plan:
    """Both passes together, a third of it forward."""
    forward_s = seconds / 3
    times = {"end_s": forward_s, "backward_start_s": forward_s, "backward_end_s": seconds}
    return changed(plan, **times)


def test_a_plan_agrees_with_the_profile_of_its_types() -> None:
    """The bound that one type alone would give is none for several."""
    plan = plan_in_rows(NET, (0, 2, 6))
    assert check_plan(plan) == ()
    assert against(plan, PROFILE) == []


def test_a_plan_file_that_gathers_factors_on_gpus_of_two_types_is_refused_by_check_and_launch(
    tmp_path: Path,
) -> None:
    matrix = Matrix(
        op=0, parameter="net.weight", way="factors", outputs=16, inputs=16, num_bytes=2**10, tokens=6
    )
    plan = changed(plan_in_rows(NET, (0, 2, 6)), {"gathered": (matrix,)})
    (violation,) = check_plan(plan)
    assert violation.rule == "gathered"
    assert violation.value == "gathered by devices of fast, slow, each of which steps it"
    path = tmp_path / "plan.yaml"
    write_plan(path, plan)
    checked, launched = run_spindle("check", path), run_spindle("launch", path, "--dry-run")
    assert (checked.code, launched.code) == (1, 3)
    assert "types round differently" in checked.out + checked.err
    assert "types round differently" in launched.err


def test_entries_of_a_profile_that_name_no_type_are_of_its_first() -> None:
    unnamed = [
        {
            key: tuple(
                entry.model_copy(update={"device": None}) if entry.device == "slow" else entry
                for entry in getattr(NET, key)
            )
        }
        for key in ("curve", "shares")
    ]
    profile = PROFILE.with_metaops([NET.model_copy(update=unnamed[0] | unnamed[1])])
    assert against(plan_in_rows(NET, (0, 2, 6)), profile) == []


@pytest.mark.parametrize("key", ["shares", "curve"])
def test_times_of_one_type_under_the_name_of_another_are_not_the_profiles(key: str) -> None:
    plan = plan_in_rows(NET, (0, 2, 6))
    by_type = {kind: [e for e in getattr(NET, key) if e.device == kind] for kind in ("slow", "fast")}
    renamed = [entry.model_copy(update={"device": "slow"}) for entry in by_type["fast"]]
    found = against(changed(plan, {key: (*renamed, *by_type["fast"])}), PROFILE)
    assert {each.rule for each in found} >= {"curve"}
    wrong = [each for each in found if each.rule == "curve"]
    assert len(wrong) == len(renamed)
    assert all("on a slow" in each.value and each.where.endswith(key) for each in wrong)


def test_a_slice_is_timed_by_the_type_that_its_longest_share_would_be_as_long_on() -> None:
    """4 samples on the slow device take 8 s, on a fast one half of that; the other share takes 2 s."""
    plan = plan_in_rows(NET, (0, 4, 6))
    assert check_plan(plan) == ()
    (found,) = check_plan(lasting(plan, 4.0))
    assert found.rule == "duration"
    assert found.value.endswith("backward lasts 2.66666667 s (2.67 s), as on a fast")
    assert found.expected.endswith("for 1 op on the curve of slow and fast, its devices")
    (found,) = check_plan(lasting(plan, 2.0))
    assert found.value.endswith("(1.33 s)")
    assert found.expected.endswith("for 1 op on its curve")


def test_the_first_type_is_told_as_well() -> None:
    net = metaop_on_types("t/net", 1, {"fast": 1.0, "slow": 2.0}, batch_size=6)
    (found,) = check_plan(lasting(plan_in_rows(net, (0, 2, 6)), 4.0))
    assert found.value.endswith(", as on a fast")


def test_the_profile_tells_what_the_plan_has_no_shares_of() -> None:
    plan = plan_in_rows(NET, (0, 4, 6))
    used = tuple(each for each in NET.shares if (each.device, each.samples) in (("slow", 4), ("fast", 2)))
    short = changed(lasting(plan, 4.0), {"shares": used, "curve": ()})
    (found,) = check_plan(short)
    assert "as on a" not in found.value
    (found,) = against(short, PROFILE)
    assert found.value.endswith(", as on a fast")


def in_pairs(known: Sequence[tuple[str, int]], devices: Sequence[int]) -> Plan:
    """6 samples on pairs of devices, equal shares; times of pairs are known of these types and samples."""
    shares = tuple(
        ShareTime(samples=samples, tp=2, forward_s=1.0, backward_s=2.0, source="measured", device=kind)
        for kind, samples in known
    )
    metaop = PlanMetaOp(name="t/net", task="t", num_ops=1, batch_size=6, shares=shares)
    piece = Slice(
        metaop="t/net",
        ops=(0, 1),
        devices=tuple(devices),
        dp=len(devices) // 2,
        tp=2,
        start_s=0.0,
        end_s=1.0,
        backward_start_s=1.0,
        backward_end_s=3.0,
    )
    return plan_on(cluster_of_types({"slow": 2, "fast": 2}), (metaop,), [piece])


def test_the_share_whose_time_is_not_known_is_named_with_its_type() -> None:
    """The second pair, with what is known of pairs of its own type."""
    assert check_plan(in_pairs([("slow", 3), ("fast", 3)], (0, 1, 2, 3))) == ()
    (found,) = check_plan(in_pairs([("slow", 3), ("slow", 5), ("fast", 1), ("fast", 2)], (0, 1, 2, 3)))
    assert (found.rule, found.devices) == ("allocation", (2,))
    assert found.value == "share 1, of 3 samples, tp 2, on a fast"
    assert found.expected == (
        "within the MetaOp's shares for tp 2 on a fast: from 1 to 2 samples; or a point of its curve there"
    )


def test_a_pair_across_types_is_said_with_nodes_and_types() -> None:
    (found,) = check_plan(in_pairs([("slow", 6), ("fast", 6)], (1, 2)))
    assert (found.rule, found.devices) == ("tensor-parallel", (1, 2))
    assert found.value == "hold share 0 together, on nodes 0, 1, of slow and fast"
    assert found.expected == "the 2 devices of a tensor-parallel share on one node, of one type"


def one_type(entries: Sequence[str | None]) -> tuple[Violation, ...]:
    """Of a plan on 2 CPUs whose shares, of 3 samples and more, name such types."""
    shares = tuple(
        ShareTime(samples=3 + place, forward_s=1.0, backward_s=2.0, source="measured", device=kind)
        for place, kind in enumerate(entries)
    )
    whole: MetaOpProfile = NET.model_copy(update={"shares": shares, "curve": ()})
    metaop = PlanMetaOp(**{name: getattr(whole, name) for name in PlanMetaOp.model_fields})
    times = {"start_s": 0.0, "end_s": 1.0, "backward_start_s": 1.0, "backward_end_s": 3.0}
    piece = Slice(metaop="t/net", ops=(0, 1), devices=(0, 1), dp=2, rows=(0, 3, 6), **times)  # type: ignore[arg-type]
    plan = plan_on(cluster_of(2), (metaop,), [piece.model_copy(update={"rows": (0, 2, 6)})])
    return tuple(each for each in check_plan(plan) if each.rule == "types")


def test_on_one_type_all_entries_are_of_it() -> None:
    assert one_type([None, None]) == one_type(["cpu", None]) == one_type(["other", "other"]) == ()
    for kinds in (["cpu", "other"], [None, "other"], [None, "cpu", "other"]):
        (found,) = one_type(kinds)
        assert (found.where, found.value) == ("metaops, t/net.shares", "an entry for 'other'")
        assert found.expected == "entries for the cluster's devices: cpu"


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (0, 1, 1)])
def test_entries_ascend_and_are_there_once(order: Sequence[int]) -> None:
    plan = plan_in_rows(NET, (0, 2, 6))
    slow = [each for each in NET.shares if each.device == "slow"]
    fast = [each for each in NET.shares if each.device == "fast"]
    (found,) = check_plan(changed(plan, {"shares": (*slow, *(fast[place] for place in order))}))
    assert (found.rule, found.where) == ("types", "metaops, t/net.shares")
    assert found.expected == "ascending samples, then tp, each once, of each type of device"


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"optimizer_state_sharded": False}, "updated by each of its devices, of fast, slow"),
        ({"sharding": {"t/net": Sharding.NONE}}, "updated by each of its devices, of fast, slow"),
        ({"optimizer_state_sharded": True}, None),
        ({"sharding": {"t/net": Sharding.GRADIENTS}}, None),
    ],
    ids=str,
)
def test_devices_of_several_types_do_not_update_copies_of_their_own(
    change: dict[str, Any], value: str | None
) -> None:
    """As `spindle plan` refuses it."""
    plan = plan_in_rows(NET, (0, 2, 6)).model_copy(update={"optimizer_state_sharded": True} | change)
    found = [each for each in check_plan(plan) if each.rule == "copies"]
    assert [(each.where, each.devices, each.value) for each in found] == (
        [] if value is None else [("metaops, parameters 't/net'", (0, 1), value)]
    )


@pytest.mark.parametrize("change", [{"trainable_fraction": 0.0}, {"devices": (0,), "dp": 1, "rows": None}])
def test_what_is_not_trained_or_on_one_type_alone_has_no_copies_that_part(change: dict[str, Any]) -> None:
    """Frozen parameters are never updated; and devices of one type round alike."""
    plan = plan_in_rows(NET, (0, 2, 6))
    frozen = "trainable_fraction" in change
    changed_plan = changed(plan, change) if frozen else changed(plan, None, **change)
    changed_plan = changed_plan.model_copy(update={"optimizer_state_sharded": False})
    assert not [each for each in check_plan(changed_plan) if each.rule == "copies"]
