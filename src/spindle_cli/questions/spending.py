"""What an iteration costs: money for all devices, the energy that they draw, and the CO2 of it.

Everything is of all devices of the plan's cluster over all of a predicted iteration, T seconds:

    cost = sum over devices of (price per hour) x T / 3600
    energy = sum over devices of watts x (T - idle) + idle_watts x idle
    CO2 = energy in kWh x grams per kWh

A device's idle seconds are those of the schedule in which it runs no slice, as in `explain`; it counts as
working in what transfers, sums and the update add. Where nobody has said what it draws while it waits, that
counts as work, too: with published board power the energy is then the most that the boards may draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spindle_cli.costs.flops import board_watts
from spindle_cli.files.artifact import Model
from spindle_cli.files.cluster import Cluster, NodeGroup
from spindle_cli.plan.types import Plan
from spindle_cli.units import HOUR_S, J_PER_KWH, format_grams, format_joules


class Spending(Model):
    """What an iteration takes of all devices. What is not known of a group (its price, its watts, the grams
    per kWh) is null for all.

    Attributes:
        price_per_hour: Price of all devices for an hour, in the currency of the prices.
        cost: Price of an iteration, in the same currency.
        energy_j: Joules of an iteration.
        co2_g: Grams of CO2 of an iteration.
    """

    price_per_hour: float | None = None
    cost: float | None = None
    energy_j: float | None = None
    co2_g: float | None = None


@dataclass(frozen=True)
class Figure:
    """A column of a table: its title, and a row's cell; empty where the row does not have it."""

    title: str
    cell: Callable[[Spending], str]


PRICE = Figure("price/h", lambda row: "" if row.price_per_hour is None else f"{row.price_per_hour:.4g}")
COST = Figure("cost", lambda row: "" if row.cost is None else f"{row.cost:.4g}")
ENERGY = Figure("energy", lambda row: "" if row.energy_j is None else format_joules(row.energy_j))
CO2 = Figure("CO2", lambda row: "" if row.co2_g is None else format_grams(row.co2_g))
FIGURES = (COST, ENERGY, CO2)  # of an iteration


def spending_of(plan: Plan, price_per_device_hour: float | None = None) -> Spending:
    """Return what an iteration of a plan takes; where steps run several sets of tasks, the mean of them.

    Args:
        price_per_device_hour: of every device, instead of what the cluster says of its groups.
    """
    cluster = plan.whole_cluster
    price = price_per_hour(cluster, price_per_device_hour)
    energy = energy_j(plan)
    grams = cluster.co2_grams_per_kwh
    return Spending(
        price_per_hour=price,
        cost=None if price is None else price * plan.of_steps.iteration_s / HOUR_S,
        energy_j=energy,
        co2_g=None if energy is None or grams is None else energy / J_PER_KWH * grams,
    )


def price_per_hour(cluster: Cluster, price_per_device_hour: float | None = None) -> float | None:
    """Return the price of an hour of all devices together; None where a group's is not known."""
    total = 0.0
    for group in cluster.nodes:
        price = group.price_per_device_hour if price_per_device_hour is None else price_per_device_hour
        if price is None:
            return None
        total += group.count * group.devices * price
    return total


def energy_j(plan: Plan) -> float | None:
    """Joules that all devices draw in an iteration; where steps run several sets of tasks, the mean of them.
    None where a group's watts are not known.
    """
    watts = [watts_of(group) for group in plan.cluster.nodes]
    known_watts = [power for power in watts if power is not None]
    if len(known_watts) < len(watts):
        return None
    if not plan.task_sets:
        islands = plan.whole_cluster.num_devices // plan.cluster.num_devices
        return islands * _energy_j(plan, known_watts)
    return sum(
        task_share.share * _energy_j(plan.set_plans[task_share.tasks], known_watts)
        for task_share in plan.task_sets
    )


def _energy_j(plan: Plan, watts: Sequence[float]) -> float:
    """Return the energy of an iteration of one set of tasks; `watts`: of a device of each group while it
    works.
    """
    total, first = 0.0, 0
    idle_s = _idle_s(plan)
    for group, working in zip(plan.cluster.nodes, watts, strict=True):
        count = group.count * group.devices
        waiting = working if group.idle_watts_per_device is None else group.idle_watts_per_device
        waited_s = sum(idle_s[first : first + count])
        total += working * plan.of_steps.iteration_s * count - (working - waiting) * waited_s
        first += count
    return total


def watts_of(group: NodeGroup) -> float | None:
    """Return the power of one device of a group while it works: as the group says, or as published for its
    type; None: neither.
    """
    return board_watts(group.device) if group.watts_per_device is None else group.watts_per_device


def _idle_s(plan: Plan) -> list[float]:
    """Return the seconds of the schedule in which each device runs no slice."""
    left_s = [plan.predicted.compute_s] * plan.cluster.num_devices
    for slice_ in plan.slices:
        for device in slice_.devices:
            left_s[device] -= slice_.busy_s
    return [max(0.0, seconds) for seconds in left_s]


def known_figures(rows: Sequence[Spending], among: Sequence[Figure] = FIGURES) -> tuple[Figure, ...]:
    """Return the columns that some row has anything for."""
    return tuple(figure for figure in among if any(map(figure.cell, rows)))


def unknown(
    cluster: Cluster, price_per_device_hour: float | None = None, *, wanted: bool = False
) -> tuple[str, ...]:
    """Return what keeps figures from being told, a sentence each, with the key of the cluster file that
    would.

    Args:
        wanted: also where the cluster says nothing of a figure at all; else only where it does of some
            groups.
    """
    lines = []
    without_price = [] if price_per_device_hour is not None else _without_price(cluster)
    if without_price and (wanted or len(without_price) < len(cluster.nodes)):
        lines.append(
            f"no cost: {cluster.name!r} says no price of {_listed(without_price)}; expected "
            "price_per_device_hour for each group of its nodes"
        )
    without_watts = [group for group in cluster.nodes if watts_of(group) is None]
    says_watts = cluster.co2_grams_per_kwh is not None or len(without_watts) < len(cluster.nodes)
    if without_watts and (wanted or says_watts):
        lines.append(
            f"no energy: no board power is listed for {_listed(without_watts)}; expected "
            f"watts_per_device for these groups of {cluster.name!r}"
        )
    if wanted and not without_watts and cluster.co2_grams_per_kwh is None:
        lines.append(
            f"no CO2: {cluster.name!r} says no co2_grams_per_kwh, the grams of CO2 of a kWh where it stands"
        )
    return tuple(lines)


def _without_price(cluster: Cluster) -> list[NodeGroup]:
    return [group for group in cluster.nodes if group.price_per_device_hour is None]


def _listed(groups: Sequence[NodeGroup]) -> str:
    return ", ".join(dict.fromkeys(group.label for group in groups))
