"""Why a plan is as long as it is, and why each MetaOp got its devices."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spindle_cli.errors import InputError
from spindle_cli.files.artifact import Artifact, Model
from spindle_cli.plan.islands.other_settings import OtherSettings, other_settings
from spindle_cli.plan.islands.planned import of_an_island
from spindle_cli.plan.sets.choose import of_tasks
from spindle_cli.plan.types import Plan, bounds_of_any_cut
from spindle_cli.profile.types import Profile
from spindle_cli.questions.explaining.chain import Link, critical_chain
from spindle_cli.questions.explaining.of_types import TypeReasons, type_reasons
from spindle_cli.questions.explaining.worth import Reason, Worth, reasons, worth_of


class Idle(Model):
    """Device-seconds of the schedule in which no slice runs.

    Attributes:
        device_s: How many.
        share: Their share of all device-seconds of the schedule.
    """

    device_s: float
    share: float


class Explanation(Artifact):
    """The document of `spindle explain --json`.

    Attributes:
        plan: The plan.
        strategy: Its strategy.
        num_devices: Devices of the plan; with islands, of each of them.
        islands: How many islands there are; all else is of one.
        tasks: Where not every step runs all tasks, those of the steps that it is about.
        iteration_s: Seconds of an iteration; the parts below add up to it.
        compute_s: End of the schedule.
        lower_bound_s: Seconds that no schedule can be shorter than.
        lower_bound_any_s: The same however batches are cut, where the plan says it.
        lower_bound_with_memory_s: The same of schedules that fit the devices' memory.
        lower_bound_with_links_s: The same of iterations, with what messages and sums take.
        transfer_s: What transfers add.
        processor_s: What communication and reading take of processors that compute.
        gradient_sum_s: What gradient sums add.
        optimizer_s: What the optimizer's step adds.
        held_up_s: What runs have shown beyond all that.
        idle: Device-seconds in which nothing runs.
        chain: The slices that the end of the schedule waits for, each with what it waited for itself.
        worth: What devices are worth; null without the profile.
        reasons: Why each MetaOp has its devices; empty without the profile.
        type_reasons: Why each MetaOp has its types; null without the profile, and on devices of one type.
        outer_steps: With islands, what outer steps take as they are and otherwise.
    """

    KIND: ClassVar[str] = "explanation"

    schema_: Annotated[Literal["spindle.explanation/1"], Field(alias="schema")] = "spindle.explanation/1"
    plan: str
    strategy: str
    num_devices: int
    islands: int = 1  # each with as many devices; all else is of one
    tasks: tuple[str, ...] = ()
    iteration_s: float
    compute_s: float
    lower_bound_s: float
    lower_bound_any_s: float | None = None
    lower_bound_with_memory_s: float | None = None
    lower_bound_with_links_s: float | None = None
    transfer_s: float
    processor_s: float = 0.0
    gradient_sum_s: float
    optimizer_s: float
    held_up_s: float = 0.0
    idle: Idle
    chain: tuple[Link, ...]
    worth: Worth | None
    reasons: tuple[Reason, ...]
    type_reasons: TypeReasons | None = None
    outer_steps: OtherSettings | None = None


def explain(plan: Plan, profile: Profile | None, *, plan_name: str) -> Explanation:
    """Explain a plan, or that of a set of its tasks (`Plan.set_plans`); with the profile also by the dual
    values of the program.

    Raises:
        InputError: the profile is not the one that the plan was made from.
    """
    if profile is not None and profile.sha256() != plan.profile.sha256:
        raise InputError(
            f"{plan_name}: made from the profile {plan.profile.sha256[:19]}..., "
            f"but the one given is {profile.sha256()[:19]}...",
            hint="Give the profile that the plan was made from, or plan again.",
        )
    profile = None if profile is None else of_an_island(profile)
    tasks = tuple(dict.fromkeys(metaop.task for metaop in plan.metaops)) if plan.turn is not None else ()
    if profile is not None and tasks:
        profile = of_tasks(profile, tasks)
    predicted = plan.predicted
    total_s = plan.cluster.num_devices * predicted.compute_s
    busy_s = sum(len(slice_.devices) * slice_.busy_s for slice_ in plan.slices)
    return Explanation(
        plan=plan_name,
        strategy=plan.strategy,
        num_devices=plan.cluster.num_devices,
        islands=1 if plan.local_sgd is None else plan.local_sgd.islands,
        tasks=tasks,
        iteration_s=predicted.iteration_s,
        compute_s=predicted.compute_s,
        lower_bound_s=predicted.lower_bound_s,
        **bounds_of_any_cut(predicted),
        transfer_s=predicted.transfer_s,
        processor_s=predicted.processor_s,
        gradient_sum_s=predicted.gradient_sum_s,
        optimizer_s=predicted.optimizer_s,
        held_up_s=predicted.held_up_s,
        idle=Idle(device_s=max(0.0, total_s - busy_s), share=max(0.0, 1 - busy_s / total_s)),
        chain=critical_chain(plan),
        worth=None if profile is None else worth_of(plan, profile),
        reasons=() if profile is None else reasons(plan, profile),
        type_reasons=None if profile is None else type_reasons(plan, profile),
        outer_steps=other_settings(plan),
    )
