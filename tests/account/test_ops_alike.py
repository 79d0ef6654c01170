"""Memory with ops that are alike gone through at once is that of going through them one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans import cluster_of, metaop_of, profile_of
from spindle_cli.account.device.parts import Kinds, Part, UsesCache
from spindle_cli.account.device_memory import device_memory, memory_by_pass, memory_within
from spindle_cli.costs.memory import SliceShape
from spindle_cli.files.cluster import Cluster
from spindle_cli.files.sharding import Sharding
from spindle_cli.plan.types import Slice
from spindle_cli.profile.types import MetaOpProfile, OpMemory, OptimizerBytes, Profile

NUM_DEVICES = 6
MIB = 2**20


class OpByOp(UsesCache):
    """Puts no two ops into one run."""

    def kinds(
        self, parts: Sequence[Part], slices: Sequence[SliceShape], *, op_by_op: bool, ends_apart: bool
    ) -> Kinds:
        return Kinds(parts, op_by_op=True)


def memory_of(random: Random) -> OpMemory:
    names = ("kept", "forward", "backward", "first_backward")
    sizes = {f"{name}_bytes": (random.randrange(3) * 120, random.randrange(9) * MIB) for name in names}
    return OpMemory.model_validate(sizes)


def metaop(random: Random, number: int) -> MetaOpProfile:
    num_ops = random.choice((1, 2, 5, 9))
    blocks = [random.randrange(num_ops) for _ in range(num_ops)] if random.random() < 0.3 else None
    later = random.randrange(1, num_ops + 1)
    memory = [memory_of(random)]
    if later < num_ops:
        memory.append(memory_of(random).model_copy(update={"first_op": later}))
    optimizer = OptimizerBytes(state_per_param=2.0, whole_state_per_param=1.0, whole_share=0.25)
    key = random.choice(("a", "b", None))
    return metaop_of(
        f"task{number % 2}/net{number}",
        num_ops,
        dict.fromkeys(range(1, NUM_DEVICES + 1), 1.0),
        parameters=key,
        parameter_blocks=None if key is None else blocks,
        batch_size=60,
        memory=tuple(entry.model_copy(update={"tp": tp}) for tp in (1, 2) for entry in memory),
        trainable_fraction=random.choice((1.0, 0.5, 0.0)),
        whole_param_bytes_per_op=random.choice((0, MIB // 4)),
        extra_param_bytes={0: 12 * 2**10} if random.random() < 0.3 else {},
        optimizer=optimizer if random.random() < 0.2 else None,
        inputs=(f"task{number % 2}/net{number - 2}",) if number > 1 and random.random() < 0.5 else (),
    )


def ranges_in(random: Random, ops: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Any ranges of them, also neighbours."""
    ends = sorted(random.sample(range(ops[0], ops[1] + 1), min(ops[1] - ops[0] + 1, random.choice((2, 4)))))
    return tuple(zip(ends[::2], ends[1::2], strict=False))


def slices_of(random: Random, profile: Profile, *, everywhere: bool) -> list[Slice]:
    """Each MetaOp in one or two slices one behind the other, on any devices, all passes mirrored or not."""
    found: list[Slice] = []
    start_s = 0.0
    for each in profile.metaops:
        cuts = sorted({0, random.randrange(each.num_ops + 1), each.num_ops})
        for ops in pairwise(cuts):
            count = NUM_DEVICES if everywhere else random.choice((1, 2, 3, 4, 6))
            tp = 2 if count % 2 == 0 and random.random() < 0.5 else 1
            found.append(
                Slice(
                    metaop=each.name,
                    ops=ops,
                    devices=tuple(sorted(random.sample(range(NUM_DEVICES), count))),
                    dp=count // tp,
                    tp=tp,
                    start_s=start_s,
                    end_s=start_s + 1,
                    recompute=random.random() < 0.3,
                    offload=ranges_in(random, ops) if random.random() < 0.5 else (),
                )
            )
            start_s += 1
    if random.random() < 0.5:
        last_s = 2 * start_s
        apart = [{"backward_start_s": last_s - p.end_s, "backward_end_s": last_s - p.start_s} for p in found]
        found = [piece.model_copy(update=each) for piece, each in zip(found, apart, strict=True)]
    return found


def drawn(seed: int, backend: str) -> tuple[Profile, list[Slice], Cluster]:
    random = Random(seed)
    made = [metaop(random, number) for number in range(random.choice((1, 2, 4)))]
    profile = profile_of(*made).model_copy(
        update={
            "optimizer_state_sharded": random.random() < 0.7,
            "accumulate": random.choice((1, 1, 2)),
            "gradient_bytes_per_param": random.choice((1.0, 2.0)),
            "update_bytes_per_param": 0.5,
        }
    )
    shares_out = random.random() < 0.4
    if shares_out:
        keys = sorted({each.parameters or each.name for each in made})
        levels: Mapping[str, Sharding] = {key: random.choice(list(Sharding)) for key in keys}
        profile = profile.sharded(levels)
    slices = slices_of(random, profile, everywhere=shares_out)
    return profile, slices, cluster_of(NUM_DEVICES).model_copy(update={"backend": backend})


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@given(seed=st.integers(0, 2**32))
def test_runs_of_ops_take_what_their_ops_take(backend: str, seed: int) -> None:
    profile, slices, cluster = drawn(seed, backend)
    plenty = (2**60,) * NUM_DEVICES
    at_once = memory_within(profile.metaops, slices, cluster, profile, plenty)
    one_by_one = memory_within(profile.metaops, slices, cluster, profile, plenty, OpByOp())
    assert at_once is not None
    assert one_by_one is not None
    for own, other in zip(at_once, one_by_one, strict=True):
        # The same sums in another order.
        assert own.total_bytes == pytest.approx(other.total_bytes, rel=0, abs=3)
        assert own.optimizer_bytes == pytest.approx(other.optimizer_bytes, rel=0, abs=1)
        assert own.updated_bytes == pytest.approx(other.updated_bytes, rel=0, abs=1)
        assert own.lasting_bytes == pytest.approx(other.lasting_bytes, rel=0, abs=2)


@given(seed=st.integers(0, 2**32))
def test_what_was_found_for_other_slices_changes_nothing(seed: int) -> None:
    profile, slices, cluster = drawn(seed, "nccl")
    known = UsesCache()
    random = Random(seed + 1)
    plenty = (2**60,) * NUM_DEVICES
    for _ in range(2):
        others = slices_of(random, profile, everywhere=bool(profile.sharding))
        memory_within(profile.metaops, others, cluster, profile, plenty, known)
    found = memory_within(profile.metaops, slices, cluster, profile, plenty, known)
    assert found == device_memory(profile.metaops, slices, cluster, profile)


@given(seed=st.integers(0, 2**32))
def test_the_fullest_pass_is_the_peak(seed: int) -> None:
    profile, slices, cluster = drawn(seed, "nccl")
    peaks = device_memory(profile.metaops, slices, cluster, profile)
    by_pass = memory_by_pass(profile.metaops, slices, cluster, profile)
    for peak, each in zip(peaks, by_pass, strict=True):
        assert peak.total_bytes == max([each.update_bytes, *(most for most, _ in each.passes.values())])


@pytest.mark.parametrize(("blocks", "mib"), [((0, 0, 0, 0), 1), ((0, 1, 0, 1), 2)])
def test_ops_that_use_the_same_block_make_its_gradients_once(blocks: tuple[int, ...], mib: int) -> None:
    """Four ops that use blocks of 1 MiB, on one device alone, and need nothing else."""
    nothing = {f"{name}_bytes": (0, 0) for name in ("kept", "forward", "backward", "first_backward")}
    net = metaop_of(
        "t/net",
        4,
        {1: 1.0},
        parameter_blocks=blocks,
        memory=(OpMemory.model_validate(nothing),),
        activation_bytes_per_op=0,
    )
    piece = Slice(metaop=net.name, ops=(0, 4), devices=(0,), dp=1, tp=1, start_s=0.0, end_s=4.0)
    profile = profile_of(net)
    (need,) = device_memory(profile.metaops, [piece], cluster_of(1), profile)
    assert need.parameter_bytes == mib * MIB
    assert need.gradient_bytes == mib * MIB
