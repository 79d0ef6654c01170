"""Problems whose allocations are written down, and what has to hold of every schedule of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from helpers.several_types import cluster_of_types, metaop_on_types, profile_on_types
from spindle_cli.files.cluster import Cluster
from spindle_cli.plan.problem import Point, Problem, make_problem
from spindle_cli.plan.search.listing import Job, Timed


class Has(NamedTuple):
    """A MetaOp: how many ops, on which allocations ((devices of each type), seconds of an op), the fastest
    last; behind which others; what else its profile says.
    """

    num_ops: int
    points: Sequence[tuple[tuple[int, ...], float]]
    inputs: tuple[str, ...] = ()
    more: Mapping[str, Any] = {}


def point_on(counts: tuple[int, ...], op_s: float, tp: int = 1) -> Point:
    """An allocation, data-parallel unless told."""
    devices = sum(counts)
    return Point(devices, devices // tp, tp, op_s / 3, op_s * 2 / 3, op_s, counts=counts)


def problem_of(cluster: Cluster | Mapping[str, int], **profile: Any) -> Problem:
    """A problem of these MetaOps by name (`Has`), in that order; other names are of the profile."""
    cluster = cluster if isinstance(cluster, Cluster) else cluster_of_types(cluster)
    metaops = {name: has for name, has in profile.items() if isinstance(has, Has)}
    made = [
        metaop_on_types(
            name,
            has.num_ops,
            dict.fromkeys(cluster.types, 1.0),
            **{"batch_size": 1, "inputs": has.inputs, **has.more},
        )
        for name, has in metaops.items()
    ]
    others = {name: value for name, value in profile.items() if name not in metaops}
    problem = make_problem(profile_on_types(*made).model_copy(update=others), cluster)
    nodes = [
        replace(node, points=tuple(point_on(*point) for point in has.points))
        for node, has in zip(problem.nodes, metaops.values(), strict=True)
    ]
    return replace(problem, nodes=tuple(nodes))


def random_problem(random: Random, most_types: int = 2) -> Problem:
    """Some MetaOps on some devices, whose times are whole numbers of eighths of a second; sums and moving
    activations take about as long, or no time.
    """
    types = {f"type{number}": random.randint(1, 3) for number in range(random.randint(1, most_types))}
    has: dict[str, Has] = {}
    for number in range(random.randint(1, 6)):
        inputs = tuple(name for name in has if random.random() < 0.3)
        # By devices at least one; what has more of them is faster.
        every = {
            counts
            for counts in (tuple(random.randint(0, most) for most in types.values()) for _ in range(4))
            if any(counts)
        }
        points = sorted(every or {tuple(types.values())}, key=lambda counts: (sum(counts), counts))
        last = random.randint(1, 8)
        op_s = [(last + 3 * place) / 8 for place in reversed(range(len(points)))]
        more = {
            "param_bytes_per_op": random.choice((0, 2**28, 2**33)),
            "parameters": random.choice(("shared", f"m{number}")),
            "output_bytes": random.choice((0, 2**29)),
        }
        has[f"m{number}"] = Has(random.randint(1, 6), list(zip(points, op_s, strict=True)), inputs, more)
    return problem_of(types, **has)


def random_jobs(problem: Problem, random: Random) -> list[Job]:
    """All ops in jobs on allocations at random, in some order that keeps producers before consumers."""
    left = [node.num_ops for node in problem.nodes]
    jobs: list[Job] = []
    while any(left):
        ready = [
            node
            for node in problem.nodes
            if left[node.index] and not any(left[producer] for producer in node.inputs)
        ]
        node = random.choice(ready)
        ops = random.randint(1, left[node.index])
        jobs.append((node.index, random.randrange(len(node.points)), ops))
        left[node.index] -= ops
    return jobs


def end_of(timed: Sequence[Timed]) -> float:
    """When the last job ends."""
    return max(end_s for _, _, end_s in timed)


def what_is_wrong(problem: Problem, timed: Sequence[Timed]) -> list[str]:
    """What keeps a schedule from being one: too few devices, ops, time, or a wrong order."""
    nodes = problem.nodes
    hardly = 1e-9 * problem.serial_s
    wrong = [
        f"{name} lasts {end_s - start_s}"
        for name, start_s, end_s in timed
        if abs(end_s - start_s - name[2] * nodes[name[0]].points[name[1]].op_s) > hardly or start_s < 0
    ]
    for node in nodes:
        own = sorted((start_s, end_s, job[2]) for job, start_s, end_s in timed if job[0] == node.index)
        if sum(ops for *_, ops in own) != node.num_ops or any(ops < 1 for *_, ops in own):
            wrong.append(f"ops of {node.index}: {own}")
        ends = [0.0, *(end_s for _, end_s, _ in own)]
        if any(start_s < before - hardly for (start_s, *_), before in zip(own, ends, strict=False)):
            wrong.append(f"{node.index} runs beside itself: {own}")
        for producer in node.inputs:
            made_s = max(end_s for job, _, end_s in timed if job[0] == producer)
            if own[0][0] < made_s - hardly:
                wrong.append(f"{node.index} starts before {producer} ends")
    for _, at_s, _ in timed:
        now_s = at_s + 2 * hardly
        busy = [
            nodes[job[0]].points[job[1]].of_types for job, start_s, end_s in timed if start_s <= now_s < end_s
        ]
        for kind, most in enumerate(problem.devices_of_types):
            if sum(counts[kind] for counts in busy) > most:
                wrong.append(f"more than {most} devices of type {kind} at {now_s}")
    return wrong


def chain_behind_two() -> Problem:
    """Jobs z and w of 1 and 3 s, and a chain x, y of 1 and 3 s, on two devices."""
    return problem_of(
        {"fast": 2},
        z=Has(1, [((1,), 1.0)]),
        w=Has(1, [((1,), 3.0)]),
        x=Has(1, [((1,), 1.0)]),
        y=Has(1, [((1,), 3.0)], ("x",)),
    )
