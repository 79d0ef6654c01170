"""`spindle launch --elastic`: after a loss that starting again does not mend, one device fewer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spindle_cli.elastic.replan import find_profile, replan
from spindle_cli.errors import UsageError, WorkerLostError
from spindle_cli.launch.devices import devices_here
from spindle_cli.launch.run import Prepared
from spindle_cli.launch.watching.run_report import RunReport
from spindle_cli.profile.types import Profile

Prepare = Callable[[Path, bool], Prepared]  # from a plan; whether to go on with the run that was begun
Train = Callable[[Prepared], RunReport]


@dataclass(frozen=True)
class Elastic:
    """A launch that goes on with fewer devices.

    `plan_path`: of the first plan; later ones are written beside it. `say`: takes lines for people.
    """

    plan_path: Path
    profile: Profile
    prepare: Prepare
    say: Callable[[str], None]

    @classmethod
    def of(
        cls,
        prepared: Prepared,
        plan_path: Path,
        profile_path: Path | None,
        prepare: Prepare,
        say: Callable[[str], None],
    ) -> Elastic:
        """Find before anything starts what planning again will need.

        Raises:
            UsageError: the plan's cluster has several nodes.
            InputError: the plan's profile is not there.
        """
        if prepared.share.num_nodes > 1:
            raise UsageError(
                f"--elastic: the plan's cluster {prepared.plan.cluster.name!r} has several nodes; "
                "expected one",
                hint="Plan for the nodes that are left with `spindle plan`, and go on with --resume.",
            )
        return cls(plan_path, find_profile(prepared.plan, plan_path, profile_path), prepare, say)

    def begin(self, prepared: Prepared, num_devices: int | None) -> Prepared:
        """The run on so many of the plan's devices; if None on those that are here."""
        here = devices_here(prepared.plan) if num_devices is None else num_devices
        if not here or here >= prepared.plan.cluster.num_devices:  # where there are none, the launch says so
            return prepared
        return self.on_fewer(prepared, here, goes_on=False)

    def on_fewer(self, prepared: Prepared, num_devices: int, *, goes_on: bool) -> Prepared:
        """The run by a new plan for so many devices; says so."""
        before = prepared.plan
        path = replan(before, self.plan_path, self.profile, num_devices)
        again = self.prepare(path, goes_on)
        ratio = again.plan.mean_iteration_s / before.mean_iteration_s
        self.say(
            f"planned again for {num_devices} of {before.cluster.num_devices} devices: {path}; "
            f"an iteration is predicted to take {ratio:.2f} times as long"
        )
        return again

    def train(self, prepared: Prepared, train: Train) -> tuple[Prepared, RunReport]:
        """Train to the end, on as few devices as it takes.

        Returns:
            The run as it was when it ended, and its report.

        Raises:
            WorkerLostError: a worker was lost, and its device was the last.
        """
        while True:
            try:
                return prepared, train(prepared)
            except WorkerLostError as lost:
                left = prepared.plan.cluster.num_devices - 1
                if left == 0:
                    raise
                self.say(lost.message)
            prepared = self.on_fewer(prepared, left, goes_on=True)
