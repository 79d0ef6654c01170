"""The loop as a library: iterating over a `Trainer` trains, and callbacks see what comes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import ALONE, world_of_one
from case_runs import ADAMW, Case, prepare

from spindle_cli.calibrate.reading import read_run
from spindle_cli.errors import InputError, RunFailedError, UsageError, WorkloadError
from spindle_cli.files.request import RunRequest
from spindle_cli.files.run_files import PREDICTED_FILE, model_path, read_metrics
from spindle_cli.files.runs.records import Evaluation, read_evaluations
from spindle_cli.process.environment import WorkerEnvironment
from spindle_cli.runtime.following.callback import Callback, RunInfo
from spindle_cli.runtime.following.calls import Callbacks, require_callbacks
from spindle_cli.runtime.following.loggers import of_evaluation, of_step
from spindle_cli.runtime.results import Step
from spindle_cli.runtime.trainer import RunArguments, Trainer, request_by_hand

CPU = torch.device("cpu")
CASE = Case("toy", (0,), "eval_toys", train={**ADAMW, "clip_norm": 1.0}, steps=4, dtype=None)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


class Seen(Callback):
    """What a callback is told, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def at_start(self, run: RunInfo) -> None:
        self.calls.append(("start", run.workload, run.first_step, run.total_steps))

    def after_step(self, step: Step) -> None:
        self.calls.append(("step", step.number))

    def at_checkpoint(self, step: int, folder: Path) -> None:
        assert (folder / "checkpoint.json").exists()
        self.calls.append(("checkpoint", step, folder.name))

    def at_evaluation(self, evaluation: Evaluation) -> None:
        self.calls.append(("evaluation", evaluation.step, evaluation.task))

    def at_end(self) -> None:
        self.calls.append(("end",))


def trainer_of(folder: Path, case: Case = CASE, callbacks: Any = (), **changes: object) -> Trainer:
    request = RunRequest.read(folder / "request.json") if folder.exists() else prepare(case, 1, folder)
    request = request.model_copy(update={"capture_dir": None, "checkpoint_every": None, **changes})
    return Trainer.of_connected(request, ALONE, CPU, callbacks=callbacks)


def test_steps_are_those_of_metrics_jsonl(tmp_path: Path) -> None:
    with trainer_of(tmp_path / "run") as trainer:
        assert trainer.losses == {}
        steps = []
        for step in trainer:
            assert trainer.steps_done == step.number
            behind = step.number - 1
            assert (trainer.last.number if trainer.last else 0) == behind
            steps.append(step)
        assert trainer.losses == steps[-1].task_losses
    lines = list(read_metrics(tmp_path / "run"))
    assert [step.metrics for step in steps] == lines
    assert [step.number for step in steps] == [1, 2, 3, 4]
    left = read_run(tmp_path / "run")
    assert left.measured.steps == 3
    assert all(each.forward_s > 0 and each.backward_s > 0 for each in left.measured.slices)
    with pytest.raises(AttributeError, match="cannot be set"):
        steps[0].loss = 1.0  # type: ignore[misc]


def test_callbacks_are_called_in_order_one_step_behind(tmp_path: Path) -> None:
    seen = Seen()
    with trainer_of(tmp_path / "run", callbacks=[seen], checkpoint_every=3) as trainer:
        trainer.train()
    assert seen.calls == [
        ("start", "evaluated", 1, 4),
        ("step", 1),
        ("step", 2),
        ("step", 3),
        ("checkpoint", 3, "step-000003"),
        ("step", 4),
        ("checkpoint", 4, "step-000004"),
        ("evaluation", 4, "classify"),
        ("evaluation", 4, "pairs"),
        ("end",),
    ]


def test_a_loop_that_is_left_early_ends_the_run_where_it_is(tmp_path: Path) -> None:
    with trainer_of(tmp_path / "run") as trainer:
        for step in trainer:
            if step.number == 2:
                break
        assert trainer.save().name == "step-000002"
    assert [line.step for line in read_metrics(tmp_path / "run")] == [1, 2]
    assert model_path(tmp_path / "run", 2).exists()
    with trainer_of(tmp_path / "run", resume=True) as again:
        assert [step.number for step in again] == [3, 4]


def test_a_loop_that_is_left_can_go_on(tmp_path: Path) -> None:
    with trainer_of(tmp_path / "one") as one:
        one.train()
    with trainer_of(tmp_path / "two") as two:
        numbers = [step.number for step, _ in zip(two, range(2), strict=False)]
        two.train()
    assert numbers[:2] == [1, 2]
    losses = [[line.task_losses for line in read_metrics(tmp_path / name)] for name in ("one", "two")]
    assert losses[0] == losses[1]


def test_an_error_in_the_loop_leaves_the_checkpoints_before_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), trainer_of(tmp_path / "run", checkpoint_every=1) as trainer:
        for step in trainer:
            if step.number == 2:
                raise ValueError("mine")
    assert not (tmp_path / "run" / PREDICTED_FILE).exists()
    with trainer_of(tmp_path / "run", resume=True) as again:
        assert [step.number for step in again] == [3, 4]


class Raises(Callback):
    def after_step(self, step: Step) -> None:
        if step.number == 2:
            raise KeyError("gone")


def test_a_callback_that_raises_ends_the_run_with_its_name_and_place(tmp_path: Path) -> None:
    message = r"callback Raises failed in after_step \(step 2\): KeyError: 'gone', at .*test_trainer\.py:\d+"
    with (
        pytest.raises(RunFailedError, match=message),
        trainer_of(tmp_path / "run", callbacks=[Raises()], checkpoint_every=1) as trainer,
    ):
        trainer.train()
    with trainer_of(tmp_path / "run", resume=True) as again:
        assert [step.number for step in again] == [2, 3, 4]


class Everywhere(Seen):
    on_every_rank = True


def test_callbacks_run_on_rank_0_unless_they_ask_for_every_rank() -> None:
    one, every = Seen(), Everywhere()
    for rank in (0, 1):
        Callbacks([one, every], rank).at_end()
    assert one.calls == [("end",)]
    assert every.calls == [("end",), ("end",)]


@pytest.mark.parametrize(("wrong", "what"), [(Seen, "the class Seen"), ("x", "a str")])
def test_what_is_no_callback_is_refused(wrong: object, what: str) -> None:
    with pytest.raises(WorkloadError, match=f"callbacks: found {what}, expected an object"):
        require_callbacks([Seen(), wrong])


def test_callbacks_are_named_in_the_workload_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "mine.py").write_text(
        "import spindle_cli\n\n\nclass Writes(spindle_cli.Callback):\n"
        "    def __init__(self, name):\n        self.name = name\n"
        "    def at_start(self, run):\n        self.out = run.run_dir / self.name\n"
        "    def at_end(self):\n        self.out.write_text('ended')\n"
    )
    named = [{"callback": "../mine.py:Writes", "args": {"name": "note.txt"}}]
    (tmp_path / "run").rmdir()
    case = Case("toy", (0,), "eval_toys", train={**ADAMW, "callbacks": named}, steps=1)
    with trainer_of(tmp_path / "run", case) as trainer:
        trainer.train()
    assert (tmp_path / "run" / "note.txt").read_text() == "ended"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("nowhere.py:Class", r"workload.yaml: train.callbacks\[0\]: .*nowhere.py: no such file"),
        ("no name", r"train.callbacks\[0\]: 'no name' is not a callback"),
        ({"callback": "tensorboard", "args": {"speed": 1}}, r"cannot be made with args=.*speed"),
    ],
)
def test_callbacks_that_cannot_be_made_are_refused(tmp_path: Path, named: object, message: str) -> None:
    case = Case("toy", (0,), "eval_toys", train={**ADAMW, "callbacks": [named]}, steps=1)
    with pytest.raises(InputError, match=message):
        trainer_of(tmp_path / "run", case)


def test_what_a_step_leaves_is_what_the_docs_say(tmp_path: Path) -> None:
    schedule = {"name": "StepLR", "step_size": 1, "gamma": 0.5}
    train = {**ADAMW, "lr": 0.5, "clip_norm": 1.0, "schedule": schedule, "accumulate": 2}
    with trainer_of(tmp_path / "run", Case("toy", (0,), "memory_toys", train=train, steps=3)) as trainer:
        trainer.train()
    lines = list(read_metrics(tmp_path / "run"))
    assert [line.learning_rates for line in lines] == [{"all": 0.5}, {"all": 0.25}, {"all": 0.125}]
    for line in lines:
        assert line.gradient_norm is not None and line.gradient_norm > 0
        assert line.loss == pytest.approx(
            sum(line.task_weights[name] * loss for name, loss in line.task_losses.items())
        )
        assert line.least_memory_bytes == line.most_memory_bytes
        assert line.data_wait_s is not None and 0 <= line.data_wait_s < line.iteration_s
        assert line.peak_share is None  # no peak of a CPU is published


def test_old_lines_of_metrics_still_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0, "iteration_s": 0.5}) + "\n")
    (line,) = read_metrics(tmp_path)
    assert line.gradient_norm is None and line.task_weights == {}
    assert of_step(line) == {"train/loss": 2.0, "train/iteration_s": 0.5, "train/samples_per_s": 0.0}


def test_a_norm_that_is_not_finite_is_null_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0, "iteration_s": 0.5}) + "\n")
    (line,) = read_metrics(tmp_path)
    text = line.model_copy(update={"gradient_norm": float("inf")}).to_line()
    assert json.loads(text)["gradient_norm"] is None


def test_tensorboard_gets_every_step_and_evaluation(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="spindle-cli[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    case = Case("toy", (0,), "eval_toys", train={**ADAMW, "callbacks": ["tensorboard"]}, steps=2)
    with trainer_of(tmp_path / "run", case) as trainer:
        trainer.train()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    written = [(event.step, event.value) for event in events.Scalars("train/loss")]
    lines = list(read_metrics(tmp_path / "run"))
    assert written == [(line.step, pytest.approx(line.loss, rel=1e-6)) for line in lines]
    (evaluated,) = events.Scalars("evaluation/classify/accuracy")
    found = {line.task: line for line in read_evaluations(tmp_path / "run")}
    assert (evaluated.step, evaluated.value) == (2, pytest.approx(found["classify"].metrics["accuracy"]))


def test_wandb_logs_offline_into_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="spindle-cli[wandb] is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    case = Case("toy", (0,), "eval_toys", train={**ADAMW, "callbacks": ["wandb"]}, steps=2)
    with trainer_of(tmp_path / "run", case) as trainer:
        trainer.train()
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content
    assert b"evaluation/classify/accuracy" in content


def test_evaluations_have_their_own_names() -> None:
    evaluation = Evaluation(step=3, task="a", num_samples=1, loss=0.5, metrics={"f1": 1.0}, seconds=0.0)
    assert of_evaluation(evaluation) == {"evaluation/a/loss": 0.5, "evaluation/a/f1": 1.0}


def test_evaluating_what_is_not_there_is_refused(tmp_path: Path) -> None:
    case = Case("toy", (0,), "eval_toys", args={"evaluates": False}, train=ADAMW, steps=1)
    with trainer_of(tmp_path / "run", case) as trainer:
        with pytest.raises(UsageError, match="there is no task 'nothing'"):
            trainer.evaluate("nothing")
        with pytest.raises(UsageError, match="task 'classify': there is no dataset"):
            trainer.evaluate("classify")
        trainer.train()


def asked(**changes: Any) -> RunArguments:
    usual: dict[str, Any] = {
        "plan": "plan.yaml",
        "run_dir": "run",
        "workload": None,
        "steps": None,
        "resume": False,
        "checkpoint_every": None,
        "keep": 3,
        "timeout_s": 60.0,
    }
    return RunArguments(**{**usual, **changes})


def test_a_trainer_under_torchrun_needs_a_plan_and_a_free_folder(tmp_path: Path) -> None:
    prepare(CASE, 1, tmp_path / "run")
    with pytest.raises(UsageError, match=r"spindle\.Trainer: no plan is given"):
        request_by_hand(asked(plan=None))
    with pytest.raises(UsageError, match=r"spindle\.Trainer: no run_dir is given"):
        request_by_hand(asked(run_dir=None))
    with pytest.raises(UsageError, match=r"spindle\.Trainer: steps=0: expected a number above 0"):
        request_by_hand(asked(steps=0))
    with pytest.raises(InputError, match="nowhere"):
        request_by_hand(asked(plan=tmp_path / "nowhere.yaml", run_dir=tmp_path / "new"))
    workload = str(tmp_path / "run" / "workload.yaml")
    plan = tmp_path / "run" / "plan.yaml"
    request = request_by_hand(asked(plan=plan, run_dir=tmp_path / "new", workload=workload, steps=7))
    assert (request.plan, request.steps, request.device_type) == (plan, 7, "cpu")
    (tmp_path / "new" / "metrics.jsonl").touch()
    with pytest.raises(UsageError, match="there is a run in this folder already"):
        request_by_hand(asked(plan=plan, run_dir=tmp_path / "new", workload=workload))


def test_a_script_is_no_worker_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="started by torchrun"):
        WorkerEnvironment.read()
