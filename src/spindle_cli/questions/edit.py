"""What is asked about in place of what is given: a profile with a task left out or with another batch size of
one, a cluster with another number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from spindle_cli.costs.shares import rebatched
from spindle_cli.errors import UsageError
from spindle_cli.files.cluster import MAX_DEVICES, Cluster, Links, NodeGroup
from spindle_cli.profile.types import MetaOpProfile, Profile, TaskShare


def edited(profile: Profile, without: Sequence[str], batches: Sequence[str]) -> Profile:
    """Return the profile without some tasks, then with other batch sizes ('task=size') of some.

    Raises:
        UsageError: there is no such task, or a batch size is not a number of at least 1.
    """
    for task in without:
        profile = without_task(profile, task)
    for text in batches:
        task, _, size = text.rpartition("=")
        if not (task and size.isdecimal()):
            raise UsageError(f"--batch {text}: expected TASK=SIZE, for example --batch image_text=64")
        profile = with_batch_size(profile, task, int(size))
    return profile


def without_task(profile: Profile, task: str) -> Profile:
    """Return the profile without one task's MetaOps; what it shared with others stays with them. Steps that
    ran no other task are left out.

    Raises:
        UsageError: there is no such task, or no other.
    """
    _check_task(profile, task)
    kept = tuple(metaop for metaop in profile.metaops if metaop.task != task)
    if not kept:
        raise UsageError(f"--without {task}: it is the only task of {profile.workload.name!r}")
    return _with_metaops(profile.model_copy(update={"task_sets": _sets_without(profile, task)}), kept)


def _sets_without(profile: Profile, task: str) -> tuple[TaskShare, ...]:
    """Return the sets of tasks that steps run, without one; none where every step then runs all that are
    left.
    """
    shares: dict[tuple[str, ...], float] = {}
    for task_share in profile.task_sets:
        tasks = tuple(name for name in task_share.tasks if name != task)
        if tasks:
            shares[tasks] = shares.get(tasks, 0.0) + task_share.share
    left = {metaop.task for metaop in profile.metaops} - {task}
    if [set(tasks) for tasks in shares] == [left]:
        return ()
    total = sum(shares.values())
    return tuple(TaskShare(tasks=tasks, share=share / total) for tasks, share in shares.items())


def with_batch_size(profile: Profile, task: str, batch_size: int) -> Profile:
    """Return the profile with another batch size of one task.

    An op's seconds depend on the samples per device: curve and shares are read as seconds against batch share
    and interpolated linearly between what they have (beyond it along the nearest segment). What is read so
    has the source 'fitted'. Each type of device, and each tensor-parallel degree, has a curve of its own; an
    allocation is offered for every dp of the old curve's range that divides the new batch.

    Raises:
        UsageError: there is no such task, or the batch size is below 1 or larger than anything planned.
    """
    _check_task(profile, task)
    if batch_size < 1:
        raise UsageError(f"--batch {task}={batch_size}: expected at least 1 sample")
    try:
        metaops = tuple(
            rebatched(metaop, batch_size) if metaop.task == task else metaop for metaop in profile.metaops
        )
    except ValidationError as error:  # seconds, bytes or samples beyond what files may say
        raise UsageError(
            f"--batch {task}={batch_size}: so large a batch takes more time or memory than is planned for",
            hint="Ask for a smaller one.",
        ) from error
    return _with_metaops(profile, metaops)


def _check_task(profile: Profile, task: str) -> None:
    tasks = sorted({metaop.task for metaop in profile.metaops})
    if task not in tasks:
        raise UsageError(
            f"the profile of {profile.workload.name!r} has no task {task!r}",
            hint=f"Its tasks: {', '.join(tasks)}",
        )


def _with_metaops(profile: Profile, metaops: tuple[MetaOpProfile, ...]) -> Profile:
    data = profile.model_dump(by_alias=True) | {"metaops": [metaop.model_dump() for metaop in metaops]}
    return Profile.model_validate(data)


def with_devices(cluster: Cluster, num_devices: int) -> Cluster:
    """Return the first `num_devices` devices of a cluster; more than it has are added to its last node.

    Raises:
        UsageError: fewer than one device, or more than can be planned for.
    """
    if not 1 <= num_devices <= MAX_DEVICES:
        raise UsageError(f"a cluster of {num_devices} devices was asked for; expected 1 to {MAX_DEVICES}")
    groups: list[NodeGroup] = []
    links, left = cluster.links, num_devices
    for group in cluster.nodes:
        whole, rest = divmod(min(left, group.count * group.devices), group.devices)
        if whole:
            groups.append(group.model_copy(update={"count": whole}))
        if rest:
            part, links = _parted(group.model_copy(update={"devices": rest}), links, is_new=bool(whole))
            groups.append(part)
        left -= whole * group.devices + rest
    if left:
        last = groups.pop()
        if last.count > 1:
            groups.append(last.model_copy(update={"count": last.count - 1}))
        larger = last.model_copy(update={"devices": last.devices + left})
        part, links = _parted(larger, links, is_new=last.count > 1)
        groups.append(part)
    labels = {group.label for group in groups}
    between = tuple(link for link in links.between if labels.issuperset(link.groups))
    return cluster.changed(
        name=f"{cluster.name}, {num_devices} devices",
        nodes=tuple(groups),
        links=links.model_copy(update={"between": between}),
    )


def with_one_more(cluster: Cluster, device: str) -> Cluster:
    """Return a cluster with one more device of a type, in the last node that has any."""
    place = max(number for number, group in enumerate(cluster.nodes) if group.device == device)
    group = cluster.nodes[place]
    larger = group.model_copy(update={"devices": group.devices + 1})
    larger, links = _parted(larger, cluster.links, is_new=group.count > 1)
    rest = (group.model_copy(update={"count": group.count - 1}),) if group.count > 1 else ()
    return cluster.changed(
        name=f"{cluster.name}, one more {device}",
        nodes=(*cluster.nodes[:place], *rest, larger, *cluster.nodes[place + 1 :]),
        links=links,
    )


def with_more_nodes(cluster: Cluster, place: int, num_nodes: int) -> Cluster:
    """Return a cluster with more nodes of the group at `place` in its file; later devices move up."""
    group = cluster.nodes[place]
    larger = group.model_copy(update={"count": group.count + num_nodes})
    return cluster.changed(
        name=f"{cluster.name}, {num_nodes * group.devices} more {group.label}",
        nodes=(*cluster.nodes[:place], larger, *cluster.nodes[place + 1 :]),
    )


def _parted(group: NodeGroup, links: Links, *, is_new: bool) -> tuple[NodeGroup, Links]:
    """Return a node of a group as a group of its own, with the links that the group has.

    Args:
        is_new: the rest of the group stays, and keeps its name.
    """
    one = group.model_copy(update={"count": 1})
    if not is_new or group.name is None:
        return one, links
    name = f"{group.name}, last node"
    between = [
        link.model_copy(update={"groups": tuple(name if label == group.name else label for label in groups)})
        for link in links.between
        if group.name in (groups := link.groups)
    ]
    both = links.model_copy(update={"between": (*links.between, *between)})
    return one.model_copy(update={"name": name}), both
