"""The runs of a verification: by the plan and in plain PyTorch, ready to start."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spindle_cli.errors import RunFailedError
from spindle_cli.files.request import island_dir
from spindle_cli.launch.run import build_here, run_once, threads_of_all
from spindle_cli.launch.types import Launch, LaunchOptions
from spindle_cli.plan.types import Plan
from spindle_cli.process.devices import usable_cores
from spindle_cli.process.environment import is_chosen
from spindle_cli.verify.rounding import ROUNDING_FLAG
from spindle_cli.verify.stepping.operator_noise import DRAWS, OPERATOR_NOISE_FLAG
from spindle_cli.verify.types import ArithmeticName, VerifyOptions
from spindle_cli.workload.file import Precision

if TYPE_CHECKING:
    from spindle_cli.analysis.memo import AnalysisMemo

# How OpenMP's threads wait for each other. Where others want the cores too, those that look again and again
# can take a hundred times as long as the training of a small model.
_WAITING = "OMP_WAIT_POLICY"


@dataclass(frozen=True)
class Runs:
    """The two runs of a verification, ready to start: by the plan, and the plain one. `averages`: they keep
    an average of the weights.
    """

    plan: Plan
    ours: Launch
    plain: Launch
    rounded: Launch  # plain PyTorch with rounding noise; run only where it decides
    arithmetic: ArithmeticName
    averages: bool = False
    drawn: tuple[Launch, ...] = ()  # with operators that round once more; run only where they decide

    @property
    def islands(self) -> int:
        """Groups of devices that train copies of the model; 1 where all train one."""
        return self.ours.request.islands

    @property
    def is_split(self) -> bool:
        """Whether tensor parallelism splits any layer."""
        return any(slice_.tp > 1 for slice_ in self.plan.slices)


def build_runs(
    plan: Plan,
    plan_path: Path,
    source: str,
    folder: Path,
    options: VerifyOptions,
    precision: Precision = "full",
) -> Runs:
    """Both launches below `folder`; the plain process is a launch of one worker without torchrun."""
    # So often that there is at least one outer step.
    every = None if plan.local_sgd is None else min(plan.local_sgd.every, options.steps)

    def launch(name: str, threads: int) -> Launch:
        run_dir = folder / name
        launch_options = LaunchOptions(
            steps=options.steps,
            threads=threads,
            dtype=options.dtype,
            no_randomness=options.no_randomness,
            capture_dir=run_dir.absolute() / "captured",
            worker_module=options.worker_module,
            outer_every=every,
        )
        return build_here(plan, plan_path, source, run_dir, launch_options)

    ours = launch("plan", threads_of_all(plan))
    plain = launch("plain", usable_cores())
    rounded = launch("rounded", usable_cores())
    flags = [(OPERATOR_NOISE_FLAG, str(draw)) for draw in range(1, DRAWS + 1)]
    drawn = tuple(_plain_process(launch(f"drawn-{draw}", usable_cores()), flag, draw) for flag, draw in flags)
    arithmetic: ArithmeticName = options.dtype or ("float32" if precision == "full" else precision)
    noisy = _plain_process(rounded, ROUNDING_FLAG)
    return Runs(plan, ours, _plain_process(plain), noisy, arithmetic, drawn=drawn)


def _plain_process(launch: Launch, *flags: str) -> Launch:
    argv = (sys.executable, "-m", "spindle_cli.verify.plain_process", str(launch.request_file), *flags)
    environment = launch.environment
    if not is_chosen(_WAITING):
        environment = {**environment, _WAITING: "PASSIVE"}
    return launch.model_copy(update={"argv": argv, "processes": 1, "environment": environment})


def train(launch: Launch, name: str, memo: AnalysisMemo | None = None) -> None:
    """Run one of them to its end; `name` tells them apart in messages. `memo`: what it need not find again.

    Raises:
        RunFailedError: a process failed.
    """
    failure = run_once(launch, memo)
    if failure is not None:
        said = failure.message.removeprefix("worker 0: ") if launch.processes == 1 else failure.message
        failed = RunFailedError(f"{name} failed: {said}", hint=failure.hint)
        failed.exit_code = failure.exit_code
        raise failed


def capture_dir_of(launch: Launch, island: int = 0) -> Path:
    """Return where a run of a verification, or an island of it, leaves what is compared."""
    assert launch.request.capture_dir is not None
    return island_dir(launch.run_dir, island) / launch.request.capture_dir.name
