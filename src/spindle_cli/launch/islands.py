"""What of a launch does not go with islands that average now and then alone (`train.local_sgd`)."""

from __future__ import annotations

from spindle_cli.errors import UsageError
from spindle_cli.launch.types import LaunchOptions
from spindle_cli.plan.types import Plan
from spindle_cli.workload.settings.local_sgd import nearest_multiples


def require_with_islands(plan: Plan, asked: LaunchOptions, steps: int) -> None:
    """Refuse what a plan with islands cannot do.

    Args:
        steps: at which the run is to end.

    Raises:
        UsageError: naming the option, and what goes instead.
    """
    if plan.local_sgd is None:
        return
    every = plan.local_sgd.every
    if steps % every:
        raise UsageError(
            f"--steps {steps}: it ends between two outer steps, of which there is one after every {every} "
            "steps (train.local_sgd): islands have different models there",
            hint=f"Take a multiple of {every}, such as {nearest_multiples(steps, every)}.",
        )
    if asked.async_checkpoints:
        raise UsageError(
            "--async-checkpoints: does not go with islands (train.local_sgd), which save one after the other",
            hint="Leave it out: training waits for each checkpoint then.",
        )
