"""What a team's devices take together, as a profile in which the team is one device.

All parameters are shared out by the team, so that MetaOps which have any run on all of its devices, in shares
as equal as can be; others on as many of them as are fastest.
"""

from __future__ import annotations

from typing import NamedTuple

from spindle_cli.costs.share_times import OpSeconds, point_of_share, share_seconds
from spindle_cli.costs.work import reached_by_gradients
from spindle_cli.files.sharding import Sharding, ShardingOf
from spindle_cli.plan.best.micro_batches import needs_whole_batch
from spindle_cli.plan.best.sharding import key_of, keys_with_parameters, longer_on
from spindle_cli.plan.teams.cluster import Team
from spindle_cli.profile.types import CurvePoint, MetaOpProfile, OpMemory, Profile, ShareTime


class Way(NamedTuple):
    """How a MetaOp runs on a team: on how many of its devices, and what one op takes there without gathers
    and scatters.
    """

    dp: int
    op: OpSeconds


def shared_out(profile: Profile) -> dict[str, Sharding]:
    """By key, what teams share out: all parameters."""
    return dict.fromkeys(keys_with_parameters(profile), Sharding.PARAMETERS)


def way_on(metaop: MetaOpProfile, samples: int, size: int, sharding: ShardingOf) -> Way | None:
    """How a MetaOp's batch of so many samples runs on a team of `size` devices; None: it cannot, or nothing
    is known of such shares.

    Args:
        samples: its `batch_size`, or those of a micro-batch.
    """
    is_whole = samples == metaop.batch_size
    if key_of(metaop) in sharding:
        op = _seconds(metaop, samples, size, is_whole=is_whole) if samples >= size else None
        return None if op is None else Way(size, op)
    known = [
        Way(dp, op)
        for dp in range(min(size, samples), 0, -1)
        if (op := _seconds(metaop, samples, dp, is_whole=is_whole)) is not None
    ]
    return min(known, key=lambda way: way.op.forward_s + way.op.backward_s, default=None)


def _seconds(metaop: MetaOpProfile, samples: int, dp: int, *, is_whole: bool) -> OpSeconds | None:
    """Of one op: of equal shares of a whole batch as plans say it, by the curve."""
    if not is_whole or samples % dp:
        return share_seconds(metaop.shares, -(-samples // dp), 1)
    for point in metaop.curve:
        if (point.dp, point.tp) == (dp, 1):
            return OpSeconds(point.forward_s, point.backward_s, point.communication_s)
    return None


def on_team(profile: Profile, team: Team) -> Profile | None:
    """The profile of one device that is as fast as a team; None: a MetaOp cannot run on one.

    Args:
        profile: with what the team shares out; of whole batches or of micro-batches.
    """
    reached = reached_by_gradients(profile.metaops)
    found = []
    for metaop in profile.metaops:
        seen = _seen(metaop, profile, team, is_reached=reached[metaop.name])
        if seen is None:
            return None
        found.append(seen)
    own = {"optimizer_s_per_byte": profile.optimizer_s_per_byte / team.size}
    return profile.model_copy(update=own).with_metaops(found).sharded({})


def _seen(metaop: MetaOpProfile, profile: Profile, team: Team, *, is_reached: bool) -> MetaOpProfile | None:
    way = way_on(metaop, metaop.batch_size, team.size, profile.sharding)
    if way is None:
        return None
    point = point_of_share(way.dp, 1, way.op)
    forward_s, backward_s = longer_on(metaop, point, team.cluster, profile, is_reached=is_reached)
    alone = CurvePoint(
        num_devices=1,
        dp=1,
        forward_s=point.forward_s + forward_s / metaop.num_ops,
        backward_s=point.backward_s + backward_s / metaop.num_ops,
        source="fitted",
    )
    # Of how many samples there is memory, where the largest share is taken for all.
    ratio = way.dp * -(-metaop.batch_size // way.dp) / metaop.batch_size
    return metaop.model_copy(
        update={
            "curve": (alone,),
            "shares": _smallest_part(metaop, alone, team.size, profile.sharding),
            "fit": None,
            "activation_bytes_per_op": round(ratio * metaop.activation_bytes_per_op),
            "memory": tuple(_together(entry, way.dp, ratio) for entry in metaop.memory if entry.tp == 1),
        }
    )


def _together(entry: OpMemory, dp: int, ratio: float) -> OpMemory:
    """What so many shares take."""
    keys = ("kept_bytes", "forward_bytes", "backward_bytes", "first_backward_bytes")
    pairs = {key: getattr(entry, key) for key in keys}
    own = {key: (dp * fixed, round(ratio * whole)) for key, (fixed, whole) in pairs.items()}
    return entry.model_copy(update=own)


def _smallest_part(
    metaop: MetaOpProfile, alone: CurvePoint, size: int, sharding: ShardingOf
) -> tuple[ShareTime, ...]:
    """The smallest micro-batch that a team can run, by which it is said how often a batch can be cut; none
    where it stays whole. (What micro-batches take is asked of their own profile.)
    """
    if needs_whole_batch(metaop):
        return ()
    for count in range(metaop.batch_size, 0, -1):
        samples = metaop.batch_size // count
        if metaop.batch_size % count == 0 and way_on(metaop, samples, size, sharding) is not None:
            seconds = {"forward_s": alone.forward_s, "backward_s": alone.backward_s}
            return (ShareTime(samples=samples, **seconds, source="fitted"),)
    return ()
