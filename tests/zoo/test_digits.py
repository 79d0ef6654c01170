"""The data and the model of `digits`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from spindle_cli.errors import WorkloadError
from spindle_cli.zoo.digits.build import BATCH_SIZES, build
from spindle_cli.zoo.digits.data import DIGIT_NAMES, SPEECH_FILE, DigitPairs, encode, load_split


def test_held_out_samples_are_not_trained_on_and_cover_every_digit() -> None:
    train, held_out = load_split(False), load_split(True)
    assert len(train.images) + len(held_out.images) == 1797
    assert len(train.speech) == 8 * 160 and len(held_out.speech) == 3 * 160
    for trained, kept in ((train.images, held_out.images), (train.speech, held_out.speech)):
        seen = {row.numpy().tobytes() for row in trained.values}
        assert not any(row.numpy().tobytes() in seen for row in kept.values)
        assert set(kept.digits.tolist()) == set(trained.digits.tolist()) == set(range(10))


def test_inputs_lie_between_minus_one_and_one() -> None:
    for clips in (load_split(False).images, load_split(False).speech):
        assert clips.values.min() == -1 and clips.values.max() == 1


def test_speech_file_is_small() -> None:
    assert SPEECH_FILE.stat().st_size < 2_000_000


def test_every_language_names_every_digit_differently_and_every_name_fits() -> None:
    for language, names in DIGIT_NAMES.items():
        assert len(names) == len(set(names)) == 10, language
        for name in names:
            assert bytes(encode(name).tolist()).rstrip(b"\0").decode() == name


@pytest.mark.parametrize("modalities", [("image", "text"), ("speech", "text"), ("image", "speech")])
def test_all_modalities_of_a_sample_show_its_digit(modalities: tuple[str, str]) -> None:
    data = DigitPairs(modalities, repeats=2)
    split = load_split(False)
    clips = {"image": split.images, "text": split.texts, "speech": split.speech}
    for index in (0, 1, 77, len(data) - 1):
        item = data[index]
        for modality in modalities:
            same = (clips[modality].values == item[modality]).flatten(1).all(dim=1)
            assert item["label"] in clips[modality].digits[same]


def test_samples_depend_on_their_index_alone_and_repeats_bring_other_partners() -> None:
    data, again = DigitPairs(["image", "speech"], repeats=2), DigitPairs(["image", "speech"], repeats=2)
    half = len(data) // 2
    assert torch.equal(data[3]["speech"], again[3]["speech"])
    assert torch.equal(data[3]["image"], data[3 + half]["image"])
    partners = [not torch.equal(data[k]["speech"], data[k + half]["speech"]) for k in range(20)]
    assert sum(partners) > 15


def test_an_index_beyond_the_samples_is_refused() -> None:
    data = DigitPairs(["image"])
    with pytest.raises(IndexError, match=str(len(data))):
        data[len(data)]


def test_the_images_are_those_that_scikit_learn_gives() -> None:
    from sklearn.datasets import load_digits  # here: whoever collects tests would import it for 1 s

    pixels, digits = load_digits(return_X_y=True)
    for held_out in (False, True):
        images, own = load_split(held_out).images, (np.arange(len(pixels)) % 5 == 0) == held_out
        assert torch.equal(images.values.flatten(1), torch.from_numpy(pixels[own]).float() / 8 - 1)
        assert images.digits.tolist() == digits[own].tolist()


def test_without_scikit_learn_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load_split.cache_clear()
    monkeypatch.setattr("spindle_cli.zoo.digits.data.find_spec", lambda name: None)
    with pytest.raises(WorkloadError) as refused:
        DigitPairs(["image"])[0]
    assert "pip install 'spindle-cli[demo]'" in str(refused.value)


def test_five_tasks_share_three_encoders_and_differ_in_batch_size() -> None:
    workload = build()
    modules = {task.name: task.module for task in workload.tasks}
    assert modules["image_text"].image is modules["image_speech"].image is modules["image_class"].image
    assert modules["speech_text"].speech is modules["image_speech"].speech is modules["speech_class"].speech
    assert modules["image_text"].text is modules["speech_text"].text
    assert len(set(BATCH_SIZES.values())) == len(BATCH_SIZES)


def test_an_unknown_task_among_the_batch_sizes_is_refused() -> None:
    with pytest.raises(WorkloadError, match="digits: batch_sizes: found 'smell'"):
        build(batch_sizes={"smell": 3})


def test_images_are_learnt_and_held_out_ones_recognised() -> None:
    torch.manual_seed(0)
    task = next(task for task in build().tasks if task.name == "image_class")
    optimizer = torch.optim.AdamW(task.module.parameters(), lr=2e-3)
    order = torch.randperm(len(task.dataset), generator=torch.Generator().manual_seed(0)).tolist()
    for step in range(60):
        batch = default_collate([task.dataset[order[(64 * step + k) % len(order)]] for k in range(64)])
        optimizer.zero_grad()
        task.module(**batch).backward()
        optimizer.step()
    images = load_split(True).images
    with torch.no_grad():
        answered = task.module.classifier.predict(task.module.image(images.values))
    assert (answered == images.digits).float().mean() > 0.6
