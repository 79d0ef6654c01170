"""The moving average of the weights is torch's, goes on from checkpoints, and changes places with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from alone import run, world_of_one
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from spindle_cli.checkpoint.files import checkpoint_folder
from spindle_cli.errors import InputError
from spindle_cli.export.run import export_run
from spindle_cli.export.types import ExportOptions
from spindle_cli.runtime.update.average import WeightAverage
from spindle_cli.runtime.update.owned_ranges import OwnedRange
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.settings.updates import Average


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


def of(values: list[float], **settings: float) -> tuple[nn.Parameter, OwnedRange, WeightAverage]:
    parameter = nn.Parameter(torch.tensor(values))
    owned = OwnedRange("w", (2, 4), parameter)
    return parameter, owned, WeightAverage(Average.model_validate(settings), [owned])


def put(parameter: nn.Parameter, value: float) -> None:
    parameter.detach().fill_(value)


def test_the_first_average_is_the_weights_and_each_next_one_moves_by_the_rest_of_the_decay() -> None:
    parameter, owned, average = of([0.0, 0.0], decay=0.75)
    assert average.of(owned) is None
    expected = {8.0: 8.0, 4.0: 7.0, 11.0: 8.0}  # 0.75 x 8 + 0.25 x 4, 0.75 x 7 + 0.25 x 11
    for value, hand in expected.items():
        put(parameter, value)
        average.update()
        found = average.of(owned)
        assert found is not None
        assert found.tolist() == [hand, hand]


def test_it_is_made_after_every_so_many_steps() -> None:
    parameter, owned, average = of([0.0, 0.0], decay=0.5, every=3)
    seen = []
    for step in range(1, 8):
        put(parameter, float(step))
        average.update()
        found = average.of(owned)
        seen.append(None if found is None else found[0].item())
    assert seen == [None, None, 3.0, 3.0, 3.0, 4.5, 4.5]


def test_a_resumed_one_counts_on_and_begins_what_was_not_saved_anew() -> None:
    old, new = (OwnedRange(name, None, nn.Parameter(torch.tensor([2.0]))) for name in "ab")
    average = WeightAverage(Average(decay=0.5, every=2), [old, new])
    average.resume(3, [(old, torch.tensor([6.0]))])
    assert average.of(new) is None
    average.update()  # the fourth
    assert [average.of(each).tolist() for each in (old, new)] == [[4.0], [2.0]]


def test_weights_and_averages_change_places_and_back() -> None:
    parameter, owned, average = of([1.0, 2.0], decay=0.5)
    average.exchange()  # there is none yet
    assert parameter.tolist() == [1.0, 2.0]
    average.update()
    put(parameter, 7.0)
    average.exchange()
    assert parameter.tolist() == [1.0, 2.0]
    assert average.of(owned).tolist() == [7.0, 7.0]
    average.exchange()
    assert parameter.tolist() == [7.0, 7.0]


def test_it_is_torchs_own() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    owned = [OwnedRange(name, None, parameter) for name, parameter in model.named_parameters()]
    ours = WeightAverage(Average(decay=0.9), owned)
    for _ in range(4):
        for each in owned:
            each.tensor.detach().add_(torch.randn_like(each.tensor))
        theirs.update_parameters(model)
        ours.update()
    for each, expected in zip(owned, theirs.module.parameters(), strict=True):
        assert torch.equal(ours.of(each), expected)


TRAIN = {"optimizer": "SGD", "lr": 0.05, "ema": {"decay": 0.5, "every": 2}}


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint_folder(folder, step) / "rank-00000.safetensors")


def test_a_run_goes_on_with_its_average_bit_for_bit_and_the_average_is_of_what_was_saved(
    tmp_path: Path,
) -> None:
    run(tmp_path / "whole", train=TRAIN)
    run(tmp_path / "parts", steps=3, train=TRAIN)
    assert not any(key.endswith(".ema") for key in run_keys(tmp_path / "first", 1))
    run(tmp_path / "parts", resume=True)
    whole, parts = saved(tmp_path / "whole", 6), saved(tmp_path / "parts", 6)
    assert {key for key in whole if not torch.equal(whole[key], parts[key])} == set()
    averages = {key: value for key, value in whole.items() if key.endswith(".ema")}
    assert averages
    for key, value in averages.items():  # after steps 2, 4 and 6
        name = key.removeprefix("optimizer.state.").removesuffix(".ema")
        last, before = whole[f"model.{name}"], saved(tmp_path / "whole", 4)[key]
        assert torch.allclose(value, (last + before) / 2, rtol=0, atol=1e-15), name


def run_keys(folder: Path, steps: int) -> set[str]:
    run(folder, steps=steps, train=TRAIN)
    return set(saved(folder, steps))


def test_another_decay_is_another_run_and_one_begun_from_it_may_leave_the_average_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, steps=2, train=TRAIN)
    source = folder / "workload.yaml"
    source.write_text(source.read_text().replace("decay: 0.5", "decay: 0.25"))
    with pytest.raises(InputError, match=r"trained with train.ema = {'decay': 0.5, 'every': 2}"):
        run(folder, steps=4, resume=True)
    run(tmp_path / "without", steps=3, train={"optimizer": "SGD", "lr": 0.05}, begin_from=folder)
    assert not any(key.endswith(".ema") for key in saved(tmp_path / "without", 3))
    run(tmp_path / "with", steps=4, train=TRAIN, begin_from=tmp_path / "without")
    found = saved(tmp_path / "with", 4)
    averages = {key: value for key, value in found.items() if key.endswith(".ema")}
    assert averages
    for key, value in averages.items():  # the first of its own
        assert torch.equal(value, found[f"model.{key[len('optimizer.state.') : -len('.ema')]}"])


def test_it_is_exported_in_place_of_the_weights(tmp_path: Path) -> None:
    run(tmp_path / "run", steps=4, train=TRAIN)
    found = saved(tmp_path / "run", 4)
    for averaged, key in ((True, "optimizer.state.{}.ema"), (False, "model.{}")):
        export_run(tmp_path / "run", tmp_path / "model", ExportOptions(averaged=averaged))
        exported = load_file(tmp_path / "model")
        names = [name.removeprefix("model.") for name in found if name.startswith("model.")]
        for name in names:
            assert torch.equal(exported[name], found[key.format(name)].to(exported[name].dtype)), name
    run(tmp_path / "early", steps=1, train=TRAIN)
    with pytest.raises(InputError, match="there is no average of the weights in it"):
        export_run(tmp_path / "early", tmp_path / "model", ExportOptions(averaged=True))


@pytest.mark.parametrize(
    ("ema", "said"),
    [
        ({"decay": 1.0}, "less than 1"),
        ({"decay": 0}, "greater than 0"),
        ({}, "Field required"),
        (0.999, "dict"),
        ({"decay": 0.9, "every": 0}, "greater than or equal to 1"),
        ({"decay": 0.9, "start": 3}, "unknown key 'start'; known are decay, every"),
    ],
)
def test_malformed_averages_are_refused(ema: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainSettings.model_validate({"ema": ema})


def test_its_bytes_are_counted() -> None:
    train = TrainSettings.model_validate({"ema": {"decay": 0.9}})
    assert train.state_per_param(2.0) == 3.0
    assert train.model_copy(update={"precision": "bf16"}).state_per_param(2.0) == 8.0
    assert TrainSettings().state_per_param(2.0) == 2.0
