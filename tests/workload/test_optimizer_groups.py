"""Every trained parameter is in exactly one optimizer group, by rules that say so."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from spindle_cli.errors import WorkloadError
from spindle_cli.training.optimizing.groups import optimizer_groups
from spindle_cli.workload.file import TrainSettings


class OwnRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class PatchEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.ones(1, 1, 4))
        self.project = nn.Conv2d(1, 4, 2)


class Wide(nn.Linear):
    """A class derived from one that a rule names."""


class Text(nn.Module):
    """Its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.LayerNorm(4)
        self.wide = Wide(4, 4)
        self.attention = nn.MultiheadAttention(4, 1)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


class Image(nn.Module):
    """Shares a layer of the text model, under another name."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.patches = PatchEmbeddings()
        self.norm = OwnRMSNorm()
        self.mix = shared
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def roots() -> dict[str, nn.Module]:
    text = Text()
    return {"text": text, "image": Image(text.wide)}


ALL = {
    "text.embed.weight",
    "text.norm.weight",
    "text.norm.bias",
    "text.wide.weight",
    "text.wide.bias",
    "text.attention.in_proj_weight",
    "text.attention.in_proj_bias",
    "text.attention.out_proj.weight",
    "text.attention.out_proj.bias",
    "image.patches.cls_token",
    "image.patches.project.weight",
    "image.patches.project.bias",
    "image.norm.weight",
}


def taken(*groups: object) -> dict[str, set[str]]:
    settings = TrainSettings.model_validate({"groups": groups})
    found = optimizer_groups(settings, roots())
    return {name: set(parameters) for name, parameters in found.names().items()}


def test_no_decay_is_norms_biases_and_embeddings_and_the_rest_is_the_rest() -> None:
    settings = TrainSettings.model_validate({"groups": "no_decay", "optimizer_args": {"weight_decay": 0.3}})
    found = optimizer_groups(settings, roots())
    decayed = {
        "text.wide.weight",
        "text.attention.in_proj_weight",
        "text.attention.out_proj.weight",
        "image.patches.project.weight",
    }
    assert {name: set(names) for name, names in found.names().items()} == {
        "no_decay": ALL - decayed,
        "rest": decayed,
    }
    assert [choice.arguments for choice in found.choices] == [{"weight_decay": 0.0}, {"weight_decay": 0.3}]
    assert {choice.lr for choice in found.choices} == {1e-3}


def test_without_groups_all_have_the_settings_of_train() -> None:
    found = optimizer_groups(TrainSettings(), roots())
    assert dict(found.of) == dict.fromkeys(sorted(ALL, key=list(found.of).index), 0)
    assert found.names() == {}


def test_matrices_leave_out_embeddings_also_where_a_head_is_tied_to_one() -> None:
    assert taken({"name": "m", "kinds": ["matrices"]}, "rest")["m"] == {
        "text.wide.weight",
        "text.attention.in_proj_weight",
        "text.attention.out_proj.weight",
    }


def test_vectors_have_fewer_than_two_dimensions() -> None:
    found = taken({"name": "v", "kinds": ["vectors"]}, "rest")
    assert found["v"] == {name for name in ALL if "bias" in name or "norm" in name}


def test_classes_are_told_by_name_or_by_module_and_name_and_so_are_their_subclasses() -> None:
    assert taken({"name": "l", "modules": ["Linear"]}, "rest")["l"] == {
        "text.wide.weight",
        "text.wide.bias",
        "text.attention.out_proj.weight",
        "text.attention.out_proj.bias",
        "text.embed.weight",  # tied to the head
    }
    here = f"{__name__}:Wide"
    assert taken({"name": "l", "modules": [here]}, "rest")["l"] == {"text.wide.weight", "text.wide.bias"}


def test_what_tasks_share_is_found_by_its_name_in_any_of_them() -> None:
    assert taken({"name": "s", "parameters": ["image.mix.*"]}, "rest")["s"] == {
        "text.wide.weight",
        "text.wide.bias",
    }


def test_a_rule_wants_all_that_it_says() -> None:
    rule = {"name": "s", "parameters": ["text.*"], "kinds": ["biases"], "excluding": ["*.out_proj.*"]}
    assert taken(rule, "rest")["s"] == {"text.norm.bias", "text.wide.bias", "text.attention.in_proj_bias"}


def of_one_row(name: str, parameter: Tensor) -> bool:
    assert parameter.is_meta
    return name.startswith("image.") and parameter.shape[0] == 1


def not_sure(name: str, parameter: Tensor) -> str:
    return "yes"


def raises(name: str, parameter: Tensor) -> bool:
    raise KeyError(name)


def test_a_function_sees_names_and_shapes() -> None:
    assert taken({"name": "f", "function": f"{__name__}:of_one_row"}, "rest")["f"] == {
        "image.patches.cls_token"
    }


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            [{"name": "a", "parameters": ["text.*"]}, {"name": "b", "kinds": ["norms"]}, "rest"],
            r"parameter text.norm.weight, text.norm.bias fits 2 groups, a \(parameters: text.\*\) and b "
            r"\(kinds: norms\); expected one",
        ),
        (["no_decay"], r"no group takes parameter .*\(and 1 more\); the groups are no_decay"),
        (
            [{"name": "a", "parameters": ["text.wide.wieght"]}, "rest"],
            r"a: parameters: 'text.wide.wieght' fits the name of no .*\n.*The closest is text.wide.weight",
        ),
        (
            [{"name": "a", "parameters": ["*"], "excluding": ["nix"]}],
            "a: excluding: 'nix' fits the name of no trained parameter",
        ),
        ([{"name": "a", "modules": ["Conv3d"]}, "rest"], r"group 'a' takes no trained parameter \(modules: "),
        ([{"name": "a", "parameters": ["image.frozen.*"]}, "rest"], "fits the name of no trained parameter"),
        ([{"name": "a", "function": f"{__name__}:not_sure"}, "rest"], "gave 'yes' for text.embed.weight"),
        (
            [{"name": "a", "function": f"{__name__}:raises"}, "rest"],
            r"raises failed for .*KeyError.*\.py:\d+",
        ),
        ([{"name": "a", "function": f"{__name__}:nix"}, "rest"], "has no class or function 'nix'"),
        ([{"name": "a", "function": "not_there:nix"}, "rest"], "there is no module 'not_there'"),
    ],
)
def test_what_fits_none_or_two_is_one_message(groups: list[object], said: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        taken(*groups)
    assert re.search(said, str(caught.value), re.DOTALL), caught.value


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"groups": "nodecay"}, "tuple"),
        ({"groups": []}, "at least 1 item"),
        ({"groups": ["nodecay"]}, "'nodecay' is no group by itself; expected no_decay or rest"),
        ({"groups": ["rest", "rest"]}, "2 groups are named 'rest'"),
        ({"groups": ["rest", {"name": "other", "rest": True}]}, "'rest' and 'other' both take the rest"),
        ({"groups": [{"name": "a"}]}, "'a': expected parameters, modules, kinds or function, or rest: true"),
        ({"groups": [{"name": "a", "rest": True, "kinds": ["norms"]}]}, "takes what no other group takes"),
        ({"groups": [{"name": "a", "kinds": ["norm"]}]}, "'norms', 'biases'"),
        ({"groups": [{"name": "a", "kinds": ["norms"], "learning_rate": 1}]}, "unknown key 'learning_rate'"),
        ({"groups": [{"name": "a", "kinds": ["norms"], "lr": 0}]}, "greater than 0"),
        ({"groups": [{"name": "a", "function": "path/to.txt:f"}]}, "expected package.module:name"),
        ({"groups": [{"name": "a", "kinds": ["norms"], "contract": "whole"}]}, "by import path"),
        ({"contract": "whole"}, "contract: goes with an optimizer by import path"),
    ],
)
def test_malformed_groups_are_refused(train: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        TrainSettings.model_validate(train)


def test_a_group_takes_from_train_what_it_does_not_say() -> None:
    train = TrainSettings.model_validate(
        {
            "optimizer": "SGD",
            "lr": 0.5,
            "optimizer_args": {"momentum": 0.9, "nesterov": True},
            "groups": [
                {"name": "same", "kinds": ["norms"], "optimizer_args": {"momentum": 0.1}},
                {"name": "other", "kinds": ["biases"], "optimizer": "AdamW", "lr": 0.25},
                "rest",
            ],
        }
    )
    same, other, rest = train.choices
    assert (same.optimizer, same.lr, same.arguments) == ("SGD", 0.5, {"momentum": 0.1, "nesterov": True})
    assert (other.optimizer, other.lr, other.arguments) == ("AdamW", 0.25, {})
    assert (rest.optimizer, rest.lr, rest.arguments) == ("SGD", 0.5, {"momentum": 0.9, "nesterov": True})


def test_the_words_and_their_rules_are_the_same_settings() -> None:
    assert TrainSettings.model_validate({"groups": "no_decay"}) == TrainSettings.model_validate(
        {"groups": ["no_decay", "rest"]}
    )
    again = TrainSettings.model_validate({"groups": "no_decay"}).model_dump()
    assert TrainSettings.model_validate(again) == TrainSettings.model_validate({"groups": "no_decay"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float16_autocast_refuses_parameters_that_are_narrow_themselves(dtype: torch.dtype) -> None:
    train = TrainSettings.model_validate({"precision": "fp16-autocast"})
    narrow = roots()
    narrow["text"].norm.to(dtype)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(WorkloadError, match=f"parameters that are float32, and text.norm.weight is {kind}"):
        optimizer_groups(train, narrow)
    narrow["text"].norm.requires_grad_(False)  # what is not trained may be
    assert "text.norm.weight" not in optimizer_groups(train, narrow).of
