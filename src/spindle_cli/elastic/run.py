"""`spindle launch --elastic`: after a loss that starting again does not mend, one device fewer.

The workload is planned again for them, from the profile that its plan was made from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spindle_cli.check.run import check_plan
from spindle_cli.errors import InputError, UsageError, WorkerLostError
from spindle_cli.launch.run import Prepared
from spindle_cli.launch.watching.run_report import RunReport
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile
from spindle_cli.questions.edit import with_devices

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
        here = prepared.devices_here if num_devices is None else num_devices
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


def find_profile(plan: Plan, plan_path: Path, given: Path | None) -> Profile:
    """The profile that a plan was made from: `given`, or one of the JSON files beside the plan or here.

    Raises:
        InputError: `given` is another; or there is none.
    """
    if given is not None:
        profile = Profile.read(given)
        if profile.sha256() != plan.profile.sha256:
            raise InputError(
                f"--profile {given}: the plan was made from another profile",
                hint="Give the profile that the plan was made from, or plan again from this one.",
            )
        return profile
    folders = dict.fromkeys((plan_path.absolute().parent, Path.cwd()))
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        try:
            profile = Profile.read(path)
        except InputError:  # some other file
            continue
        if profile.sha256() == plan.profile.sha256:
            return profile
    raise InputError(
        f"{plan_path}: to plan again for fewer devices its profile is needed; none of the JSON files in "
        f"{' or '.join(map(str, folders))} is it",
        hint="Say where it is with --profile PROFILE.json.",
    )


def replan(plan: Plan, plan_path: Path, profile: Profile, num_devices: int) -> Path:
    """Plan for the first `num_devices` devices of a plan's cluster, by the same strategy.

    Returns:
        The new plan's file, beside the plan's.

    Raises:
        NoPlanError: nothing fits so few devices.
        InputError: the file cannot be written.
    """
    made = make_plan(profile, with_devices(plan.cluster, num_devices), plan.strategy)
    violations = check_plan(made, profile)
    assert not violations, "the planner broke a rule: " + "; ".join(map(str, violations))
    path = plan_path.with_name(f"{plan_path.stem}-on-{num_devices}.yaml")
    write_plan(path, made)
    return path
