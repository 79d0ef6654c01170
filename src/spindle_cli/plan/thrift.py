"""What to give up when memory runs short, in the order of what is tried."""

from __future__ import annotations

from collections.abc import Iterator

from spindle_cli.plan.problem import Thrift
from spindle_cli.profile.types import Profile

# Shares of all activations, from the MetaOps that keep most: enough steps to recompute little more than
# needed.
RECOMPUTED_SHARES = (0.25, 0.5, 0.75, 1.0)


def thrifts(profile: Profile) -> Iterator[Thrift]:
    """All but the first, which gives up nothing: tensor parallelism as far as the curves have it,
    recomputation.
    """
    degrees = sorted({point.tp for metaop in profile.metaops for point in metaop.curve})
    for least_tp in degrees:
        for share in (0.0, *RECOMPUTED_SHARES):
            if least_tp > 1 or share > 0:
                yield Thrift(least_tp, heaviest(profile, share))


def heaviest(profile: Profile, share: float) -> frozenset[str]:
    """Names of the MetaOps that keep most activations, until they have this share of all."""
    kept = {metaop.name: metaop.num_ops * metaop.activation_bytes_per_op for metaop in profile.metaops}
    wanted = share * sum(kept.values())
    names: set[str] = set()
    covered = 0
    for name in sorted(kept, key=lambda name: (-kept[name], name)):
        if covered >= wanted:
            break
        names.add(name)
        covered += kept[name]
    return frozenset(names)


def describe(thrift: Thrift) -> str:
    """What a plan under this thrift says about it."""
    parts = []
    if thrift.least_tp > 1:
        parts.append(f"tensor parallelism of at least {thrift.least_tp} where a curve has it")
    if thrift.recompute:
        parts.append(f"recomputed activations in {len(thrift.recompute)} MetaOps")
    return "Memory asks for " + " and ".join(parts) + "; without that no plan fits."
