"""What no profile of ours has, and a person may write: it is refused, and not planned with."""

from __future__ import annotations

import re
from typing import Any

import pytest

from helpers.cut import cuttable
from helpers.plans import metaop_of, profile_of
from spindle_cli.costs.shares import rebatched
from spindle_cli.errors import InputError
from spindle_cli.profile.batch_sums import BatchSum
from spindle_cli.profile.points import MAX_OPS
from spindle_cli.profile.types import MetaOpProfile, Profile


def read(metaop: MetaOpProfile, **changes: Any) -> MetaOpProfile:
    data = profile_of(metaop).model_dump(mode="json", by_alias=True)
    data["metaops"][0] |= changes
    return Profile.from_data(data, where="p.json").metaops[0]


SUMS = (BatchSum(num_bytes=8, forward=1, backward=1),)
MEMORY = {key: [0, 0] for key in ("kept_bytes", "forward_bytes", "backward_bytes", "first_backward_bytes")}
MATRIX = {"op": 1, "parameter": "w", "way": "rows", "outputs": 4, "inputs": 4, "num_bytes": 64, "tokens": 8}
ON_ONE = metaop_of("t/loss", 1, {1: 1.0})


@pytest.mark.parametrize(
    ("metaop", "found"),
    [
        (metaop_of("t/net", 2, {1: 1.0, 2: 0.6}), "a point of the curve has dp 2"),
        (cuttable("t/net", 2, {8: 1.0, 4: 0.6}), "a point of the curve has dp 2"),
        (
            cuttable("t/net", 2, {8: 1.0, 4: 0.6}).model_copy(update={"curve": ON_ONE.curve}),
            "there are shares",
        ),
        (ON_ONE.model_copy(update={"batch_sums": SUMS}), "there are batch_sums"),
    ],
)
def test_what_is_coupled_is_never_split(metaop: MetaOpProfile, found: str) -> None:
    assert not read(metaop).coupled
    said = f"true of {metaop.name!r}, whose batch is then never split, and {found}; expected neither"
    with pytest.raises(InputError) as refused:
        read(metaop, coupled=True)
    assert refused.value.message.startswith(f"p.json: metaops[0].coupled: {said}")


def test_what_is_coupled_may_have_its_whole_batch_and_another() -> None:
    net = read(ON_ONE, coupled=True)
    assert net.coupled
    assert rebatched(net, 12).coupled


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"field_bytes": {"1": 8}}, "field_bytes: op 1 of 't/loss'; expected one of its 1, from 0"),
        ({"extra_param_bytes": {"-1": 8}}, "extra_param_bytes: op -1 of 't/loss'"),
        ({"memory": [MEMORY, MEMORY | {"first_op": 1}]}, "memory: op 1 of 't/loss'"),
        ({"matrices": [MATRIX]}, "matrices: op 1 of 't/loss'"),
        ({"gathered": [MATRIX]}, "gathered: op 1 of 't/loss'"),
    ],
)
def test_nothing_is_said_of_ops_that_are_not_there(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=rf"^p.json: metaops\[0\]\.{re.escape(said)}"):
        read(ON_ONE, **changes)


def test_there_are_only_so_many_ops() -> None:
    """Of one MetaOp, or of all together."""
    most = metaop_of("t/net", MAX_OPS, {1: 1.0})
    assert read(most).num_ops == MAX_OPS
    with pytest.raises(InputError, match=rf"num_ops: .* equal to {MAX_OPS} \(found {MAX_OPS + 1}\)"):
        read(most, num_ops=MAX_OPS + 1)
    other = metaop_of("t/more", 1, {1: 1.0})
    data = profile_of(most).model_dump(mode="json", by_alias=True)
    data["metaops"].append(other.model_dump(mode="json"))
    with pytest.raises(InputError) as refused:
        Profile.from_data(data, where="p.json")
    assert refused.value.message == (
        "p.json: metaops: 20,001 ops together, 20,000 of them of 't/net'; at most 20,000 can be planned for: "
        "make operators of larger parts of the model"
    )
