"""What forward reads is known from its code, and who changes it is told how to declare it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from spindle_cli import Task, Workload
from spindle_cli.errors import WorkloadError
from spindle_cli.training.callbacks import refuse_setters
from spindle_cli.training.watch import Watch
from spindle_cli.workload.building.load import LoadedWorkload, load, named_function

from . import watched_code
from .watched_code import FACTORS, LIMITS, MODELS, Model


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = watched_code.TEMPERATURE, watched_code.UNREAD, dict(LIMITS), FACTORS.square
    weight = watched_code.Schedule.weight
    yield
    watched_code.Schedule.weight = weight  # type: ignore[method-assign]
    watched_code.shifted.more = watched_code.shifted.__defaults__[0][0] = 0.0  # type: ignore[attr-defined, index]
    watched_code.TEMPERATURE, watched_code.UNREAD = before[:2]
    LIMITS.clear()
    LIMITS.update(before[2])
    FACTORS.square = before[3]
    watched_code.Reversed.strength = 1.0


def watch_of_model() -> tuple[Watch, Model]:
    made = watched_code.build()
    return Watch.of(made), MODELS[-1]


def set_global(name: str, value: Any) -> Callable[[Model], None]:
    return lambda _: setattr(watched_code, name, value)


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "by a method that forward calls": (
        lambda m: m.set_beta(0.5),
        r"task 'task': forward reads beta, which was 0.0",
    ),
    "by getattr": (lambda m: setattr(m, "named", 1.0), r"reads named"),
    "in an operator": (lambda m: setattr(m.block, "rate", 0.25), r"reads block\.rate"),
    "of an object's method": (lambda m: setattr(m.schedule, "begins", 1.0), r"reads schedule\.begins"),
    "of an object in one": (lambda m: setattr(m.config.inner, "scale", 2.0), r"config\.inner\.scale"),
    "another object": (lambda m: setattr(m, "schedule", type(m.schedule)()), r"reads schedule"),
    "in a list": (lambda m: m.steps.__setitem__(1, 5.0), r"reads steps"),
    "a longer list": (lambda m: m.steps.append(5.0), r"reads steps"),
    "a global of a function": (set_global("TEMPERATURE", 0.5), r"watched_code:TEMPERATURE, which was 1.0"),
    "in a dict": (lambda _: LIMITS.update(high=2.0), r"watched_code:LIMITS\.high, which was 1.0 .* is 2.0"),
    "of a class": (lambda _: setattr(FACTORS, "square", 3.0), r"FACTORS\.square, which was 2.0"),
    "of a function's backward": (
        lambda _: setattr(watched_code.Reversed, "strength", 0.5),
        r"Reversed\.strength, which was 1.0",
    ),
    "a tensor": (
        lambda m: m.kept.fill_(1.0),
        r"reads kept, which is a tensor of shape .* with another content than when it was traced",
    ),
    "another tensor": (lambda m: setattr(m, "kept", torch.ones(2)), r"reads kept"),
    "a whole number": (lambda m: setattr(m, "beta", 0), r"reads beta"),
    "a mode of a part": (lambda m: m.block.linear.eval(), r"block\.linear\.training"),
    "a number of a layer": (lambda m: setattr(m, "beta", math.nan), r"reads beta, which was 0.0 .* is nan"),
    "what a function has around it": (
        lambda m: setattr(m.add.__closure__[0], "cell_contents", 0.5),
        r"reads offset, which was 0.25",
    ),
    "what a function keeps on itself": (
        lambda _: setattr(watched_code.shifted, "more", 0.5),
        r"reads .*watched_code:shifted\.more, which was 0.0 .* is 0.5",
    ),
    "a default": (
        lambda _: watched_code.shifted.__defaults__[0].__setitem__(0, 0.5),  # type: ignore[index]
        r"reads .*watched_code:shifted\.by, which is \[0.5\] with another content",
    ),
    "another function": (
        lambda m: setattr(m, "criterion", nn.functional.gelu),
        r"reads criterion, which was the function relu when .* is the function gelu",
    ),
    "another method": (
        lambda m: setattr(m, "weighted", abs),
        r"reads weighted, which was not there when .* is the function abs",
    ),
    "another method of a class": (
        lambda m: setattr(type(m.schedule), "weight", lambda _: 1.0),
        r"Schedule\.weight, which was the function Schedule.weight",
    ),
    "another layer": (
        lambda m: setattr(m.block, "linear", nn.Identity()),
        r"reads block\.linear, which was a Linear when it was traced and is a Identity",
    ),
    "a parameter's gradient": (
        lambda m: m.block.linear.bias.requires_grad_(False),
        r"task 'task': the parameter 'block\.linear\.bias' takes no gradient any more",
    ),
}


@pytest.mark.parametrize("kind", ["a tensor", "another tensor"])
def test_a_buffer_changed_between_steps_is_noticed_before_the_step_takes_it_as_it_is(kind: str) -> None:
    """What a step does in front of its passes may change buffers, too: their values count from there."""
    change, said = CHANGES[kind]
    watch, model = watch_of_model()
    watch.check_between(2)
    change(model)
    with pytest.raises(WorkloadError, match=said):
        watch.check_between(2)
    watch.record_buffers()
    watch.check(2)


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_what_forward_reads_is_noticed(kind: str) -> None:
    change, said = CHANGES[kind]
    watch, model = watch_of_model()
    watch.check(2)
    change(model)
    with pytest.raises(WorkloadError, match=said) as caught:
        watch.check(2)
    assert "before step 3" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "epoch", 3),
        lambda m: setattr(m.schedule, "told", 3),
        lambda _: setattr(FACTORS, "unread", 3.0),
        set_global("UNREAD", 3.0),
        lambda m: setattr(m, "new", 3.0),
        lambda m: setattr(m, "steps", [1.0, 2.0]),
        lambda m: setattr(m, "beta", float("0.0")),
        lambda m: m.block.linear.weight.data.fill_(1.0),
    ],
)
def test_what_forward_does_not_read_may_change(change: Callable[[Model], object]) -> None:
    watch, model = watch_of_model()
    change(model)
    watch.check(0)


NOISE = {"sigma": 0.0}


class Scaled:
    """A transform with a number, as people have it."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


class Data(Dataset[dict[str, Tensor]]):
    """Reads numbers of its own, of a transform and of the file; counts, keeps, and is told its epoch."""

    def __init__(self) -> None:
        self.level, self.epoch, self.reads = 0.0, 0, 0
        self.transform = Scaled()
        self.seen: dict[int, int] = {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        self.seen[index] = self.reads
        return {"x": self.transform(torch.ones(4) + self.level + self.epoch) + NOISE["sigma"]}


class Stacked:
    """A collate with a number."""

    def __init__(self) -> None:
        self.most = 4

    def __call__(self, items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {"x": torch.stack([item["x"] for item in items])[: self.most]}


def reading(*, is_wrapped: bool = True) -> tuple[Watch, Data, Stacked]:
    data, stacked = Data(), Stacked()
    made = watched_code.build()
    made.tasks[0].dataset = Subset(data, range(8)) if is_wrapped else data
    made.tasks[0].collate = stacked
    return Watch.of(made), data, stacked


DATA_CHANGES: dict[str, tuple[Callable[[Data, Stacked], object], str]] = {
    "by an attribute": (lambda data, _: setattr(data, "level", 0.5), r"Data\.level, which was 0.0 at first"),
    "of a transform": (lambda data, _: setattr(data.transform, "factor", 2.0), r"Data\.transform\.factor"),
    "another transform": (lambda data, _: setattr(data, "transform", Scaled()), r"Data\.transform"),
    "of a collate": (lambda _, stacked: setattr(stacked, "most", 2), r"Stacked\.most, which was 4"),
}


@pytest.mark.parametrize("kind", DATA_CHANGES)
def test_a_change_of_what_data_read_is_noticed(kind: str) -> None:
    change, said = DATA_CHANGES[kind]
    watch, data, stacked = reading()
    watch.check(1)
    watch.record()
    change(data, stacked)
    with pytest.raises(WorkloadError, match=rf"task 'task': the data read {said}") as caught:
        watch.check(2)
    assert "before step 3" in str(caught.value)
    assert "set_epoch" in str(caught.value.hint)


def test_what_data_set_themselves_while_they_are_read_may_change() -> None:
    watch, data, _ = reading(is_wrapped=False)
    assert data[3]["x"].tolist() == [1.0] * 4
    data.set_epoch(2)
    watch.check(1)


def test_what_passes_change_is_none_of_this() -> None:
    watch, model = watch_of_model()
    model.beta, model.kept = 3.0, torch.ones(2)
    model.steps.append(3.0)
    watch.record()
    watch.check(1)
    model.steps.pop()
    with pytest.raises(WorkloadError, match="reads steps"):
        watch.check(2)


def test_not_a_number_stays_what_it_is() -> None:
    made = watched_code.build()
    MODELS[-1].beta = MODELS[-1].steps[0] = math.nan
    watch = Watch.of(made)
    MODELS[-1].beta = float("nan")
    MODELS[-1].steps[0] = float("nan")
    watch.check(0)


def test_the_way_to_declare_it_is_said_with_its_name() -> None:
    watch, model = watch_of_model()
    model.block.rate = 0.25
    with pytest.raises(WorkloadError) as caught:
        watch.check(0)
    line = next(
        number
        for number, text in enumerate(Path(watched_code.__file__).read_text().splitlines(), 1)
        if "self.linear(x)) * self.rate" in text
    )
    assert f"watched_code.py:{line}: task 'task': forward reads block.rate" in str(caught.value)
    assert "step_values={'block.rate': function}" in str(caught.value)
    assert "run.set_value('task/block.rate', number)" in str(caught.value)


def test_what_no_task_can_name_is_to_be_kept_where_one_can() -> None:
    watch, model = watch_of_model()
    model.add.__closure__[0].cell_contents = 0.5
    with pytest.raises(WorkloadError) as caught:
        watch.check(0)
    assert "reads offset, which was 0.25" in str(caught.value)
    assert "attribute of the task's module (self.offset = 0.0)" in str(caught.value.hint)
    assert "step_values={'offset': function}" in str(caught.value.hint)


def loaded(folder: Path, callback: str, function: str = "build") -> LoadedWorkload:
    source = folder / "w.yaml"
    train = {"callbacks": [f"{watched_code.__file__}:{callback}"]}
    content = {
        "schema": "spindle.workload/1",
        "model": f"{watched_code.__file__}:{function}",
        "train": train,
    }
    source.write_text(yaml.safe_dump(content))
    return load(str(source))


@pytest.mark.parametrize(
    ("callback", "name"),
    [
        ("ByFunction", "beta"),
        ("ByMethod", "beta"),
        ("ByName", "named"),
        ("ByGlobal", "TEMPERATURE"),
        ("ByKey", "high"),
        ("ByClass", "square"),
    ],
)
def test_a_callback_whose_code_sets_what_forward_reads_is_refused(
    callback: str, name: str, tmp_path: Path
) -> None:
    made = loaded(tmp_path, callback)
    said = rf"watched_code\.py:\d+: the callback {callback} sets '{name}', which forward reads \(.*\.py:\d+\)"
    with pytest.raises(WorkloadError, match=said):
        refuse_setters(made.train, made.source, made.workload)


def test_its_own_attributes_are_its_own(tmp_path: Path) -> None:
    made = loaded(tmp_path, "Own")
    refuse_setters(made.train, made.source, made.workload)


def test_a_callback_does_not_set_what_is_declared(tmp_path: Path) -> None:
    made = loaded(tmp_path, "ByFunction", "declared")
    with pytest.raises(
        WorkloadError, match=r"ByFunction sets 'beta', which is task/beta of the tasks' step_values"
    ):
        refuse_setters(made.train, made.source, made.workload)


def test_a_file_and_what_others_import_by_its_name_are_one_module(tmp_path: Path) -> None:
    (tmp_path / "shared_by_name.py").write_text("MODELS = []\n\ndef build():\n    return MODELS\n")
    (tmp_path / "helper_of_it.py").write_text(
        "import shared_by_name\n\ndef seen():\n    return shared_by_name.MODELS\n"
    )
    build = named_function("shared_by_name.py:build", tmp_path, where="w")
    seen = named_function("helper_of_it:seen", tmp_path, where="w")
    assert build() is seen() is sys.modules["shared_by_name"].MODELS


def test_a_file_that_is_not_found_by_its_name_stays_apart(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same_name.py").write_text("NAME = __name__\n\ndef build():\n    return NAME\n")
    one, two = (
        named_function("same_name.py:build", tmp_path / folder, where="w") for folder in ("one", "two")
    )
    assert one() != two()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_buffers_of_scripted_layers_are_passes_own_and_nobody_else_s() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.jit.script(nn.BatchNorm1d(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).square().mean()

    model = Scripted()
    watch = Watch.of(Workload(name="w", tasks=[Task("t", model, batch_size=8, dataset=[{}])]))
    model(torch.arange(32.0).view(8, 4))
    watch.record()
    watch.check(1)
    model.norm.running_mean.add_(1.0)
    with pytest.raises(WorkloadError, match=r"reads norm\.running_mean"):
        watch.check(1)
