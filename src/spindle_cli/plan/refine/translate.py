"""From slices of a plan to the schedule that a search changes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spindle_cli.account.activations import edges_between, order_passes
from spindle_cli.account.types import Pass
from spindle_cli.costs.recompute_and_offload import Again, spread_over
from spindle_cli.plan.ordering.timed import timed
from spindle_cli.plan.problem import Problem
from spindle_cli.plan.refine.schedule import Schedule, free_schedule
from spindle_cli.plan.refine.tables import Option, Tables, shape_of
from spindle_cli.plan.types import Slice


class Translation:
    """Between the slices of a problem's plans and schedules."""

    def __init__(self, problem: Problem, tables: Tables, options: Sequence[Sequence[Option]]) -> None:
        """`options`: those that the tables are of."""
        self._problem, self._tables = problem, tables
        self._options = [option for of_metaop in options for option in of_metaop]
        self._metaops = {metaop.name: number for number, metaop in enumerate(problem.profile.metaops)}
        self._numbers = {
            (option.metaop.name, shape_of(option.point), option.again, option.moved > 0): number
            for number, option in enumerate(self._options)
        }

    def schedule_of(self, slices: Sequence[Slice], num_places: int) -> Schedule | None:
        """The schedule of some slices, with so many places for slices; None where an allocation or cut is
        none of those that tables have, or activations of other ops are moved to host memory.
        """
        schedule = free_schedule(self._tables, num_places)
        for number, slice_ in enumerate(slices):
            key = (
                slice_.metaop,
                shape_of(replace(self._problem.point_of(slice_), rows=slice_.rows)),
                Again.of(slice_),
                bool(slice_.offload),
            )
            option = self._numbers.get(key)
            if option is None or slice_.micro_batches > 1 or not self._goes_by_type(slice_):
                return None
            if slice_.offload != spread_over(*slice_.ops, self._options[option].moved):
                return None
            schedule.slices[number] = self._metaops[slice_.metaop], *slice_.ops, option
            schedule.devices[number, : len(slice_.devices)] = slice_.devices
        for metaop, of_metaop in enumerate(schedule.of_metaop):
            members = [number for number in range(len(slices)) if schedule.slices[number]["metaop"] == metaop]
            if len(members) >= len(of_metaop):
                return None
            members.sort(key=lambda number: int(schedule.slices[number]["first"]))
            of_metaop[: 1 + len(members)] = len(members), *members
        order = order_passes(slices, edges_between(slices, self._problem.profile.by_name))
        schedule.order[0] = len(order)
        schedule.order[1 : 1 + len(order)] = [2 * pass_.slice_index + pass_.is_backward for pass_ in order]
        return schedule

    def slices_of(self, schedule: Schedule) -> tuple[Slice, ...]:
        """Slices with the times of both passes, in order of start."""
        places = [place for place, metaop in enumerate(schedule.slices["metaop"]) if metaop >= 0]
        number_of = {place: number for number, place in enumerate(places)}
        order = [
            Pass(number_of[int(current) >> 1], bool(current & 1))
            for current in schedule.order[1 : 1 + schedule.order[0]]
        ]
        return timed(self._problem, [self._slice(schedule, place) for place in places], order)

    def _slice(self, schedule: Schedule, place: int) -> Slice:
        _, first, last, number = map(int, schedule.slices[place].item())
        metaop, point, again, moved, _ = self._options[number]
        return Slice.model_construct(
            metaop=metaop.name,
            ops=(first, last),
            devices=tuple(map(int, schedule.devices[place, : point.num_devices])),
            dp=point.dp,
            tp=point.tp,
            rows=point.rows,
            start_s=0.0,
            end_s=0.0,
            recompute=again is not Again.NOTHING,
            selective=again is Again.SELECTIVE,
            offload=spread_over(first, last, moved),
        )

    def _goes_by_type(self, slice_: Slice) -> bool:
        """Whether a slice's devices are of one type after the other."""
        types = self._tables.devices["type"][list(slice_.devices)]
        return bool(np.all(types[:-1] <= types[1:]))
