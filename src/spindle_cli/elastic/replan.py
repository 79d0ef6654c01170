"""Plans a workload again for fewer devices, from the profile that its plan was made from."""

from __future__ import annotations

from pathlib import Path

from spindle_cli.check.run import check_plan
from spindle_cli.errors import InputError
from spindle_cli.plan.file import write_plan
from spindle_cli.plan.make import make_plan
from spindle_cli.plan.types import Plan
from spindle_cli.profile.types import Profile
from spindle_cli.questions.clusters import with_devices


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
