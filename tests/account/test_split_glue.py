"""What tensor parallelism splits of glue: heads and embeddings over many words."""

from __future__ import annotations

from test_device_memory import gpus, mib, model, needs_of, op, slice_of

from spindle_cli.costs.memory import held_param_bytes
from spindle_cli.units import MIB


def test_tensor_parallelism_splits_of_the_glue_what_the_profile_says() -> None:
    """Of 4 MiB of the second op's glue 3 are split four ways, the first op's 2 are not."""
    sizes = {"param_bytes_per_op": 4 * MIB, "extra_param_bytes": {0: 2 * MIB, 1: 4 * MIB}}
    net = model("a/m", 2, op(tp=4), split_extra_param_bytes={1: 3 * MIB}, **sizes)
    piece = slice_of("a/m", (0, 2), [0, 1, 2, 3], 1, tp=4)
    needs = needs_of([net], [piece], gpus(4), optimizer_state_sharded=True)
    assert [mib(need.parameter_bytes) for need in needs] == [(1 + 1 + 2 + 3 / 4 + 1,)] * 4
    assert [mib(need.optimizer_bytes) for need in needs] == [(2 * (2 + 3 / 4 + 3 / 4),)] * 4
    (first, second) = (held_param_bytes(net, index, 4) / MIB for index in (0, 1))
    assert (first, second) == (1 + 2, 1 + 3 / 4 + 1)
