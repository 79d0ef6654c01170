"""Numbers that tasks declare are those of each step, on every rank; what nobody declares stays as it is."""

from __future__ import annotations

import copy
import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import value_toys
from alone import ALONE, run_case, world_of_one
from case_runs import ADAMW, SGD, Case, captured, prepare, run_cases
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from value_toys import BUILT, HANDED, SETTINGS, Net

from spindle_cli.errors import RunFailedError, UsageError, WorkloadError
from spindle_cli.files.run_files import StepMetrics, read_metrics
from spindle_cli.files.runs.records import read_evaluations
from spindle_cli.runtime.following.callback import Callback, RunInfo
from spindle_cli.runtime.results import Step
from spindle_cli.runtime.trainer import Trainer
from spindle_cli.training.data.reading import open_batches
from spindle_cli.verify.plain import PlainTraining
from spindle_cli.workload.building.load import load

LAYERS = "net/layers"
APART = (  # the first layer's batch on two devices, the loss's on three
    (LAYERS, (0, 1), (0, 1)),
    (LAYERS, (1, 2), (3,)),
    (LAYERS, (2, 3), (1, 2)),
)
CONTROLS = {"callbacks": [f"{value_toys.__file__}:Controls"]}
ON_FOUR = (
    Case("apart", APART, "value_toys", steps=5),
    Case("whole", (2,), "value_toys", train=ADAMW, steps=4),
    Case("accumulated", APART, "value_toys", train={**ADAMW, "accumulate": 2}, steps=4, recompute=[LAYERS]),
    Case("compiled", APART, "value_toys", train={**SGD, "compile": "aot_eager"}, steps=4),
    Case("begun", APART, "value_toys", train=ADAMW, steps=3, checkpoint_every=3),
    Case("gone-on", APART, "value_toys", train=ADAMW, steps=6, goes_on_with="begun"),
    Case("set", APART, "value_toys", args={"controlled": True}, train={**SGD, **CONTROLS}, steps=5),
    Case(
        "set-begun",
        APART,
        "value_toys",
        args={"controlled": True},
        train={**SGD, **CONTROLS},
        steps=3,
        checkpoint_every=3,
    ),
    Case(
        "set-gone-on",
        APART,
        "value_toys",
        args={"controlled": True},
        train={**SGD, **CONTROLS},
        steps=6,
        goes_on_with="set-begun",
    ),
)
BY_NAME = {case.name: case for case in ON_FOUR}


@pytest.fixture(autouse=True)
def settings() -> None:
    """As they begin."""
    SETTINGS["margin"] = 0.5


@pytest.fixture(scope="module")
def runs(forker: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for each case."""
    folder = tmp_path_factory.mktemp("values")
    run_cases(forker, ON_FOUR, 4, folder, fails=False)
    return folder


def plain_losses(source: str, steps: int, numbers: Callable[[int], Mapping[str, Any]]) -> list[float]:
    """A plain loop that sets the numbers itself."""
    loaded = load(source)
    (task,) = loaded.workload.tasks
    net, train = BUILT[-1], loaded.train
    net.double()
    optimizer = getattr(torch.optim, train.optimizer)(net.parameters(), lr=train.lr, **train.optimizer_args)
    batches = open_batches(task, train.seed, loading=train.loader.of("net"), varies=False)
    losses = []
    for step in range(steps):
        value_toys.set_by_hand(net, numbers(step))
        optimizer.zero_grad()
        count, total = train.accumulate, 0.0
        for number in range(step * count, (step + 1) * count):
            batch = {name: field.double() for name, field in batches.rows(number, 0, 4).items()}
            loss = net(**batch, slope=numbers(step)["slope"])["loss"] / count
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
    return losses


def found(folder: Path) -> list[StepMetrics]:
    return list(read_metrics(folder))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["apart", "whole", "accumulated", "compiled"])
def test_four_workers_train_with_the_numbers_of_each_step(name: str, runs: Path) -> None:
    expected = plain_losses(str(runs / name / "workload.yaml"), BY_NAME[name].steps, value_toys.numbers_of)
    lines = found(runs / name)
    assert [line.loss for line in lines] == pytest.approx(expected, rel=1e-10)
    assert lines[1].step_values == {
        "net/beta": 0.25,
        "net/layers.*.gain": 0.75,
        "net/config.power": 2.0,
        "net/slope": 0.1,
        "net/value_toys:SETTINGS.margin": 0.5,
    }


@pytest.mark.processes
def test_a_run_goes_on_with_the_numbers_of_its_next_step(runs: Path) -> None:
    expected = plain_losses(str(runs / "begun" / "workload.yaml"), 6, value_toys.numbers_of)
    assert [line.loss for line in found(runs / "begun")] == pytest.approx(expected, rel=1e-10)


def by_control(first: float) -> Callable[[int], Mapping[str, Any]]:
    """What is set after a step is read from the second one after it on: the next has begun by then."""

    def numbers(step: int) -> Mapping[str, Any]:
        return {**value_toys.numbers_of(step), "beta": first if step < 2 else (step - 1) / 8}

    return numbers


@pytest.mark.processes
def test_what_a_callback_sets_reaches_every_rank(runs: Path) -> None:
    expected = plain_losses(str(runs / "set" / "workload.yaml"), 5, by_control(0.25))
    lines = found(runs / "set")
    assert [line.step_values["net/beta"] for line in lines] == [0.25, 0.25, 1 / 8, 2 / 8, 3 / 8]
    assert [line.loss for line in lines] == pytest.approx(expected, rel=1e-10)


@pytest.mark.processes
def test_what_a_callback_has_set_is_in_checkpoints(runs: Path) -> None:
    """All that is set after the third step is there, as it is saved behind that."""
    saved = json.loads((runs / "set-begun/checkpoints/step-000003/checkpoint.json").read_text())
    assert saved["step_values"] == {"net/beta": 3 / 8}
    lines = found(runs / "set-begun")
    assert [line.step_values["net/beta"] for line in lines] == [0.25, 0.25, 1 / 8, 3 / 8, 3 / 8, 4 / 8]


@pytest.mark.processes
def test_ranks_end_with_the_same_parameters(runs: Path) -> None:
    final: dict[str, torch.Tensor] = {}
    for of_rank in captured(runs / "set", "final", 4):
        for name, tensor in of_rank.items():
            assert torch.equal(final.setdefault(name, tensor), tensor), name
    assert len(final) == 6


@pytest.fixture
def alone() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.mark.usefixtures("alone")
def test_evaluations_read_the_numbers_of_the_step_before(tmp_path: Path) -> None:
    made = Case("run", (0,), "value_toys", args={"evaluated": True}, train={**SGD, "eval_every": 2}, steps=3)
    request = run_case(made, tmp_path / "run")
    net = Net().double()
    weights = captured(request.run_dir, "final", 1)[0]
    net.load_state_dict({**net.state_dict(), **{k.removeprefix("net."): v for k, v in weights.items()}})
    numbers = value_toys.numbers_of(2)
    before = dict(SETTINGS)
    value_toys.set_by_hand(net, numbers)
    points = [value_toys.Points()[index] for index in range(24)]
    batch = {name: torch.stack([point[name] for point in points]).double() for name in ("x", "y")}
    with torch.no_grad():
        expected = net(**batch, slope=numbers["slope"])["loss"].item()
    SETTINGS.update(before)
    evaluations = list(read_evaluations(request.run_dir))
    assert [each.step for each in evaluations] == [2, 3]
    assert evaluations[-1].loss == pytest.approx(expected, rel=1e-10)


def trainer_of(folder: Path, callbacks: Any = (), args: Mapping[str, object] | None = None) -> Trainer:
    made = Case("run", (0,), "value_toys", args=args or {"declared": False}, steps=4)
    request = prepare(made, 1, folder).model_copy(update={"capture_dir": None})
    return Trainer.of_connected(request, ALONE, torch.device("cpu"), callbacks=callbacks)


class Does(Callback):
    """Calls something after the first step."""

    def __init__(self, does: Callable[[Net], None]) -> None:
        self.does = does

    def after_step(self, step: Step) -> None:
        if step.number == 1:
            self.does(BUILT[-1])


def set_margin(net: Net) -> None:
    SETTINGS["margin"] = 0.75


CHANGES: Mapping[str, tuple[Callable[[Net], object], str]] = {
    "attribute": (
        lambda net: setattr(net, "beta", 0.5),
        r"reads beta, which was 0.0 .* is 0.5 before step 3",
    ),
    "of an operator": (lambda net: setattr(net.layers[1], "gain", 0.7), r"layers\.1\.gain, which was 0.5"),
    "of a layer of torch's": (lambda net: setattr(net.drop, "p", 0.1), r"reads drop\.p, which was 0.0"),
    "of an object": (lambda net: setattr(net.config, "power", 2.0), r"config\.power, which was 1.0"),
    "of the class": (lambda net: setattr(Net, "temperature", 3.0), r"temperature, which was 2.0"),
    "over the class's": (
        lambda net: setattr(net, "temperature", 3.0),
        r"temperature, which was not there",
    ),
    "of a module": (set_margin, r"value_toys:SETTINGS\.margin, which was 0.5 .* is 0.75"),
    "a mode": (lambda net: net.eval(), r"reads .*training, which was True"),
    "gradients": (
        lambda net: net.layers[0].linear.weight.requires_grad_(False),
        r"takes no gradient any more",
    ),
    "numpy's": (lambda net: setattr(net, "beta", __import__("numpy").float64(0.5)), r"beta, which was 0.0"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", CHANGES)
def test_what_somebody_else_changes_ends_the_run_before_it_trains_another_model(
    kind: str, tmp_path: Path
) -> None:
    does, said = CHANGES[kind]
    try:
        with (
            pytest.raises(WorkloadError, match=said) as caught,
            trainer_of(tmp_path / "run", [Does(does)]) as trainer,  # type: ignore[arg-type]
        ):
            trainer.train()
    finally:
        Net.temperature = 2.0
    assert len(found(tmp_path / "run")) == 2
    if kind == "attribute":
        assert re.match(r".*value_toys\.py:\d+: task 'net': forward reads beta", str(caught.value))
        assert "step_values={'beta': function}" in str(caught.value)
        assert "run.set_value('net/beta', number)" in str(caught.value)


def weight_of(net: Net) -> nn.Parameter:
    return net.layers[0].linear.weight


@torch.no_grad()
def clamped(net: Net) -> None:
    weight_of(net).clamp_(-0.1, 0.1)


@torch.no_grad()
def moved_together(net: Net) -> None:
    torch._foreach_mul_([weight_of(net)], 0.9)


WEIGHT = r"the parameter 'layers\.0\.linear\.weight' of task 'net' in after_step \(step 1\): other devices"
WRITES: Mapping[str, tuple[Callable[[Net], object], str]] = {
    "a parameter": (clamped, WEIGHT),
    "its data": (lambda net: weight_of(net).data.clamp_(-0.1, 0.1), WEIGHT),
    "several": (moved_together, WEIGHT),
    "a row": (lambda net: weight_of(net).detach()[0].zero_(), WEIGHT),
    "other memory": (lambda net: setattr(weight_of(net), "data", torch.zeros(6, 6)), WEIGHT),
    "another": (lambda net: setattr(net.layers[0].linear, "weight", nn.Parameter(torch.zeros(6, 6))), WEIGHT),
    "values from elsewhere": (lambda net: net.load_state_dict(net.state_dict()), r"the buffer 'shift"),
    "a buffer": (lambda net: net.shift.fill_(1.0), r"the buffer 'shift' of task 'net' in after_step"),
    "an array": (lambda net: weight_of(net).detach().numpy().__imul__(0.9), WEIGHT),
    "a view of an array": (lambda net: np.asarray(weight_of(net).data[1:])[0].fill(0.0), WEIGHT),
    "an array of a buffer": (lambda net: net.shift.numpy().fill(1.0), r"the buffer 'shift' of task 'net'"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", WRITES)
def test_a_callback_that_changes_what_is_trained_ends_the_run(kind: str, tmp_path: Path) -> None:
    does, said = WRITES[kind]
    with (
        pytest.raises(WorkloadError, match=f"the callback Does changes {said}") as caught,
        trainer_of(tmp_path / "run", [Does(does)]) as trainer,  # type: ignore[arg-type]
    ):
        trainer.train()
    assert len(found(tmp_path / "run")) == 2
    way = (
        "step_values={'beta': function}" if "buffer" in said else "follows=[Follows(teacher, student, decay)]"
    )
    assert way in str(caught.value.hint)
    if kind == "a parameter":
        assert re.match(r".*test_step_values_in_runs\.py:\d+: the callback", str(caught.value))


HANDS_OUT = {"declared": False, "hands_out": True}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_callback_that_writes_into_what_a_build_has_handed_out_ends_the_run(
    kind: str, tmp_path: Path
) -> None:
    """What is trained may have other memory by then."""

    @torch.no_grad()
    def writes(net: Net) -> None:
        assert float(HANDED[kind].sum()) != 0.0  # what was there when it was built
        HANDED[kind].__imul__(0.9)

    with (
        pytest.raises(WorkloadError, match=rf"test_step_values_in_runs\.py:\d+: .* Does changes {WEIGHT}"),
        trainer_of(tmp_path / "run", [Does(writes)], HANDS_OUT) as trainer,  # type: ignore[list-item]
    ):
        trainer.train()
    assert len(found(tmp_path / "run")) == 2


@pytest.mark.usefixtures("alone")
def test_a_hook_that_writes_into_an_array_of_a_builds_ends_the_run(tmp_path: Path) -> None:
    """torch calls it whoever steps an optimizer."""

    def writes(*_: object) -> None:
        HANDED["array"].__imul__(0.9)

    said = r"test_step_values_in_runs\.py:\d+: what runs in step 1 .* changes the parameter 'layers\.0"
    hook = register_optimizer_step_post_hook(writes)
    try:
        with (
            pytest.raises(WorkloadError, match=said),
            trainer_of(tmp_path / "run", args=HANDS_OUT) as trainer,
        ):
            trainer.train()
    finally:
        hook.remove()
    assert found(tmp_path / "run") == []


@pytest.mark.usefixtures("alone")
def test_a_callback_hands_out_no_memory_of_what_is_trained(tmp_path: Path) -> None:
    def by_dlpack(net: Net) -> None:
        np.from_dlpack(weight_of(net).detach())[0] = 0.0

    with (
        pytest.raises(RunFailedError, match=r"'layers\.0\.linear\.weight' of task 'net' hands out"),
        trainer_of(tmp_path / "run", [Does(by_dlpack)]) as trainer,
    ):
        trainer.train()


@pytest.mark.usefixtures("alone")
def test_a_callback_may_read_what_is_trained_and_change_a_copy(tmp_path: Path) -> None:
    copies: list[Net] = []

    @torch.no_grad()
    def follow(net: Net) -> None:
        assert np.isfinite(weight_of(net).numpy()).all()
        weight_of(net).clone().numpy()[0] = weight_of(net).numpy().astype("float32")[0] = 0.0
        copies.append(copy.deepcopy(net))
        for slow, fast in zip(copies[0].parameters(), net.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)

    with trainer_of(tmp_path / "run", [Does(follow)]) as trainer:
        trainer.train()
    assert len(copies) == 1
    assert len(found(tmp_path / "run")) == 4


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("where", ["at_start", "in the loop", "when it is made"])
def test_it_is_noticed_wherever_it_happens(where: str, tmp_path: Path) -> None:
    class Starts(Callback):
        def at_start(self, run: RunInfo) -> None:
            BUILT[-1].beta = 0.5

    with (
        pytest.raises(WorkloadError, match=r"beta, which was 0.0"),
        trainer_of(tmp_path / "run", [Starts()] if where == "at_start" else []) as trainer,
    ):
        if where == "when it is made":
            BUILT[-1].beta = 0.5
        for step in trainer:
            if step.number == 2:
                BUILT[-1].beta = 0.5


@pytest.mark.usefixtures("alone")
def test_a_copy_that_nobody_trains_is_noticed_too(tmp_path: Path) -> None:
    """A workload is built more than once; code of the user's may hold any of the builds."""
    made = Case("run", (0,), "value_toys", args={"declared": False}, steps=4)
    request = prepare(made, 1, tmp_path / "run").model_copy(update={"capture_dir": None})
    load(request.workload)
    other = BUILT[-1]
    callbacks = [Does(lambda _: setattr(other, "beta", 0.5))]
    with (
        pytest.raises(WorkloadError, match=r"beta, which was 0.0"),
        Trainer.of_connected(request, ALONE, torch.device("cpu"), callbacks=callbacks) as trainer,
    ):
        assert BUILT[-1] is not other
        trainer.train()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "does",
    [lambda net: setattr(net, "seen", 7), lambda net: setattr(net.config, "unread", 7.0), lambda _: None],
)
def test_what_forward_does_not_read_may_change(does: Callable[[Net], None], tmp_path: Path) -> None:
    args = {"declared": False, "counts": True}
    with trainer_of(tmp_path / "run", [Does(does)], args) as trainer:
        trainer.train()
    assert [line.step for line in found(tmp_path / "run")] == [1, 2, 3, 4]
    assert BUILT[-1].layers[0].calls > 0  # and so may what forward changes itself


@pytest.mark.usefixtures("alone")
def test_a_declared_number_is_set_by_nobody_else(tmp_path: Path) -> None:
    with (
        pytest.raises(
            WorkloadError, match=r"before step 3: net/beta is 0.9; its step_values give 0.25 for it"
        ),
        trainer_of(
            tmp_path / "run", [Does(lambda net: setattr(net, "beta", 0.9))], {"declared": True}
        ) as trainer,
    ):
        trainer.train()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("net/gain", 1.0, r"no number 'net/gain' for callbacks to set; those declared: net/beta"),
        ("net/config.power", 1.0, r"those declared: net/beta"),
        ("net/beta", float("nan"), r"nan, expected a finite number"),
        ("net/beta", True, r"True, expected a finite number"),
    ],
)
def test_numbers_that_nobody_declared_cannot_be_set(
    name: str, number: float, said: str, tmp_path: Path
) -> None:
    class Sets(Callback):
        def at_start(self, run: RunInfo) -> None:
            run.set_value(name, number)

    with (
        pytest.raises(UsageError, match=said),
        trainer_of(tmp_path / "run", [Sets()], {"controlled": True}) as trainer,
    ):
        trainer.train()


def test_verify_trains_plainly_with_the_numbers_of_each_step(tmp_path: Path) -> None:
    made = Case("run", (0,), "value_toys", train={**ADAMW, "accumulate": 2}, steps=4)
    request = prepare(made, 1, tmp_path / "run")
    training = PlainTraining(request, None)
    losses = [training.step(step).loss for step in range(4)]
    expected = plain_losses(request.workload, 4, value_toys.numbers_of)
    assert losses == pytest.approx(expected, rel=1e-10)


def test_verify_notices_a_change_as_well(tmp_path: Path) -> None:
    made = Case("run", (0,), "value_toys", args={"declared": False, "counts": True}, steps=4)
    training = PlainTraining(prepare(made, 1, tmp_path / "run"), None)
    training.step(0)
    training.step(1)
    BUILT[-1].layers[2].gain = 0.75
    with pytest.raises(WorkloadError, match=r"layers\.2\.gain, which was 0.5 .* before step 3"):
        training.step(2)


@pytest.mark.usefixtures("alone")
def test_another_build_leaves_what_all_share_as_it_is(tmp_path: Path) -> None:
    class Builds(Callback):
        def after_step(self, step: Step) -> None:
            load(str(tmp_path / "run" / "workload.yaml"))

    with trainer_of(tmp_path / "run", [Builds()], {"declared": True}) as trainer:
        trainer.train()
    margins = [line.step_values["net/value_toys:SETTINGS.margin"] for line in found(tmp_path / "run")]
    assert margins == [1.0, 1 / 2, 1 / 3, 1 / 4]
