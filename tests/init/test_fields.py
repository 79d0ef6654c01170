"""What `--field` says, and what forward takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from spindle_cli.errors import UsageError
from spindle_cli.init.fields import fields_of, parse_fields, require_used
from spindle_cli.init.types import FieldSpec


class Takes(nn.Module):
    def forward(self, image: Tensor, label: Tensor, scale: float = 1.0) -> Tensor:
        return image.sum() * label.sum() * scale


@pytest.mark.parametrize(
    ("text", "key", "spec"),
    [
        ("image=3x224x224", (None, "image"), FieldSpec("image", (3, 224, 224))),
        ("x=8", (None, "x"), FieldSpec("x", (8,))),
        ("tokens=128:int32000", (None, "tokens"), FieldSpec("tokens", (128,), 32000)),
        ("label=int10", (None, "label"), FieldSpec("label", (), 10)),
        ("my-task.label=int1", ("my-task", "label"), FieldSpec("label", (), 1)),
    ],
)
def test_fields_are_read_as_they_are_written(text: str, key: tuple[str | None, str], spec: FieldSpec) -> None:
    assert parse_fields([text]) == {key: spec}


@pytest.mark.parametrize(
    "text",
    ["", "x", "x=", "=3", "x=3x", "x=axb", "x=-1", "x=0", "x=3:int0", "label=int0", "x=3:float", "1x=3"],
)
def test_other_fields_are_wrong_use(text: str) -> None:
    with pytest.raises(UsageError, match="--field"):
        parse_fields([text])


def test_sizes_that_no_tensor_has_are_wrong_use() -> None:
    assert parse_fields(["x=2147483648"])
    for text in ("x=2147483649", "x=65536x65536", f"x=int{2**63}", "x=" + "9" * 400):
        with pytest.raises(UsageError, match="sizes"):
            parse_fields([text])


@given(st.text() | st.text("ax=.:int019 "))
def test_any_text_is_a_field_or_wrong_use(text: str) -> None:
    try:
        fields = parse_fields([text])
    except UsageError:
        return
    assert len(fields) == 1


def test_a_field_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        parse_fields(["x=1", "x=2"])
    assert len(parse_fields(["x=1", "a.x=2"])) == 2


def test_fields_come_in_the_order_of_forward_and_a_tasks_own_before_all_tasks() -> None:
    given_fields = parse_fields(["label=int10", "image=4", "a.image=5"])
    assert [(spec.name, spec.shape) for spec in fields_of("a", Takes(), given_fields)] == [
        ("image", (5,)),
        ("label", ()),
    ]
    assert fields_of("b", Takes(), given_fields)[0].shape == (4,)


def test_what_forward_needs_and_nobody_knows_is_asked_for() -> None:
    with pytest.raises(UsageError, match=r"'a' \(Takes\): forward needs label, of which"):
        fields_of("a", Takes(), parse_fields(["image=4"]))


def test_fields_that_no_model_takes_are_refused() -> None:
    require_used(parse_fields(["image=4"]), {"a": Takes(), "b": nn.Linear(2, 2)})
    with pytest.raises(UsageError, match="no forward takes 'picture'"):
        require_used(parse_fields(["picture=4"]), {"a": Takes()})
    with pytest.raises(UsageError, match="no task 'c'"):
        require_used(parse_fields(["c.image=4"]), {"a": Takes()})
    with pytest.raises(UsageError, match="no forward takes 'image'"):
        require_used(parse_fields(["b.image=4"]), {"a": Takes(), "b": nn.Linear(2, 2)})


def configured(name: str, forward: Any, **config: Any) -> nn.Module:
    """A model as Hugging Face's are: a class's name, a forward and a configuration."""
    model: nn.Module = type(name, (nn.Module,), {"forward": forward})()
    model.config = SimpleNamespace(to_dict=dict, **config)
    return model


def text(self: Any, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> None: ...
def pixels(self: Any, pixel_values: Tensor, labels: Any = None) -> None: ...
def sound(self: Any, input_features: Tensor, labels: Any = None) -> None: ...
def waves(self: Any, input_values: Tensor, labels: Any = None) -> None: ...


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (
            configured("XForCausalLM", text, vocab_size=50, max_position_embeddings=32),
            {"input_ids": ((32,), 50), "labels": ((32,), 50)},
        ),
        (
            configured("XLMHeadModel", text, vocab_size=50, n_positions=129),
            {"input_ids": ((128,), 50), "labels": ((128,), 50)},
        ),
        (
            configured("XForSequenceClassification", text, vocab_size=50, num_labels=3),
            {"input_ids": ((128,), 50), "labels": ((), 3)},
        ),
        (
            configured("XForTokenClassification", text, vocab_size=50, num_labels=3),
            {"input_ids": ((128,), 50), "labels": ((128,), 3)},
        ),
        (
            configured("XForImageClassification", pixels, image_size=32, num_channels=1, num_labels=3),
            {"pixel_values": ((1, 32, 32), None), "labels": ((), 3)},
        ),
        (
            configured("XModel", pixels, vision_config=SimpleNamespace(image_size=[16, 32])),
            {"pixel_values": ((3, 16, 32), None)},
        ),
        (
            configured(
                "XForAudioClassification", sound, num_mel_bins=80, max_source_positions=15, num_labels=2
            ),
            {"input_features": ((80, 30), None), "labels": ((), 2)},
        ),
        (configured("XModel", waves), {"input_values": ((16000,), None)}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_fields_of_hugging_face_models_follow_from_their_configuration(
    model: nn.Module, fields: dict[str, tuple[tuple[int, ...], int | None]]
) -> None:
    assert {spec.name: (spec.shape, spec.below) for spec in fields_of("a", model, {})} == fields


def test_what_the_user_says_goes_before_what_the_configuration_says() -> None:
    model = configured("XForCausalLM", text, vocab_size=50)
    spec, _ = fields_of("a", model, parse_fields(["input_ids=7:int9"]))
    assert (spec.shape, spec.below) == ((7,), 9)
