"""Initial values from files: what goes where, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from helpers.analysed import analysed
from spindle_cli.analysis.localise import load_local
from spindle_cli.errors import InputError
from spindle_cli.workload.building.load import LoadedWorkload, load, load_abstract

TOYS = Path(__file__).parent / "init_toys.py"
WIDTH = 4


def encoder(begin: float = 0.0) -> dict[str, Tensor]:
    """The tensors of two layers, all numbers different."""
    shapes = {"up.weight": (8, 4), "up.bias": (8,), "down.weight": (4, 8), "down.bias": (4,)}
    found, at = {}, begin
    for layer in range(2):
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            found[f"{layer}.{name}"] = torch.arange(at, at + size).view(shape)
            at += size
    return found


def norm() -> dict[str, Tensor]:
    return {
        "norm.weight": torch.full((4,), 3.0),
        "norm.bias": torch.full((4,), 4.0),
        "norm.running_mean": torch.full((4,), 5.0),
        "norm.running_var": torch.full((4,), 6.0),
        "norm.num_batches_tracked": torch.tensor(7),
    }


def workload_file(folder: Path, init_from: Any, function: str = "build", **args: object) -> str:
    content = {
        "schema": "spindle.workload/1",
        "model": f"{TOYS}:{function}",
        "args": args,
        "init_from": init_from,
    }
    path = folder / "workload.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return str(path)


def state(loaded: LoadedWorkload) -> dict[str, Tensor]:
    tasks = loaded.workload.tasks
    return {f"{task.name}.{key}": value for task in tasks for key, value in task.module.state_dict().items()}


MAPPED = {"*.*.*": "read.encoder.*.*.*"}


def test_every_tensor_of_several_files_comes_to_its_place_and_what_is_new_keeps_its_values(
    tmp_path: Path,
) -> None:
    (tmp_path / "encoder").mkdir()
    save_file(encoder(), tmp_path / "encoder" / "model.safetensors")
    save_file(norm(), tmp_path / "norm.safetensors")
    source = workload_file(
        tmp_path,
        [
            {"path": "encoder", "names": MAPPED, "missing": ["judge.head.*"]},
            {"path": "norm.safetensors", "names": {"norm.*": "read.norm.*"}},
        ],
    )
    before = state(load(f"{TOYS}:build"))
    loaded = load(source)
    after = state(loaded)
    expected = {
        **before,
        **{
            f"{task}.encoder.{name}": value for task in ("read", "judge") for name, value in encoder().items()
        },
        **{f"read.{name}": value for name, value in norm().items()},
    }
    assert after.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(after[name], expected[name])] == []
    assert list(loaded.initial.lines()) == [
        f"initial values of 8 parameters and buffers from {tmp_path / 'encoder'}",
        f"initial values of 5 parameters and buffers from {tmp_path / 'norm.safetensors'}",
        "new, with the values of build: 2 parameters and buffers",
    ]


def test_a_name_may_be_that_of_any_task_and_a_path_may_stand_alone(tmp_path: Path) -> None:
    saved = state(load(f"{TOYS}:build"))
    other = {name: value + 1 for name, value in saved.items() if not name.startswith("read.encoder")}
    save_file(other, tmp_path / "all.safetensors")
    after = state(load(workload_file(tmp_path, "all.safetensors")))
    assert all(torch.equal(after[name], saved[name] + 1) for name in saved)


def test_names_of_flows_modules_are_those_of_checkpoints(tmp_path: Path) -> None:
    save_file(
        {f"layer{'_2' * int(name[0])}{name[1:]}": v for name, v in encoder().items()},
        tmp_path / "a.safetensors",
    )
    source = workload_file(tmp_path, [{"path": "a.safetensors", "names": {"*": "flow.*"}}], "build_flow")
    graph = analysed(load(source).workload)
    found = dict(graph.tasks["flow"].root.named_parameters())
    assert torch.equal(found["layer_2.down.bias"], encoder()["1.down.bias"])
    assert torch.equal(found["layer.up.weight"], encoder()["0.up.weight"])


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    for path in (folder, folder / "model.safetensors.index.json"):
        source = workload_file(
            tmp_path, [{"path": str(path), "names": {"*": "alone.layers.*"}}], "build_split"
        )
        after = state(load(source))
        assert all(torch.equal(after[f"alone.layers.{name}"], value) for name, value in encoder().items())


def sharded(tmp_path: Path, **changes: str) -> Path:
    """A folder of two shards. `changes`: of the index."""
    folder = tmp_path / "shards"
    folder.mkdir(exist_ok=True)
    weights: dict[str, str] = {}
    for layer in range(2):
        part = {name: value for name, value in encoder().items() if name.startswith(f"{layer}.")}
        save_file(part, folder / f"model-{layer}.safetensors")
        weights.update(dict.fromkeys(part, f"model-{layer}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**weights, **changes}}))
    return folder


def test_a_part_of_the_model_has_only_its_own_values_and_the_rest_of_the_build_is_as_without(
    tmp_path: Path,
) -> None:
    sharded(tmp_path)
    rules = [{"path": "shards", "names": MAPPED, "missing": ["judge.head.*", "read.norm.*"]}]
    source = workload_file(tmp_path, rules)
    local = load_local(source, {"judge": [0], "read": []})
    held = {name: p for name, p in local.graph.tasks["judge"].root.named_parameters() if not p.is_meta}
    assert set(held) == {f"encoder.0.{name}.{kind}" for name in ("up", "down") for kind in ("weight", "bias")}
    before = dict(load(f"{TOYS}:build").workload.tasks[1].module.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in held.items())  # the runtime reads parts
    local.initial.fill(
        {"x": ("read.encoder.0.up.weight", held["encoder.0.up.weight"][2:5], ((2, 5), (0, 4)))}
    )
    changed = held["encoder.0.up.weight"]
    assert torch.equal(changed[2:5], encoder()["0.up.weight"][2:5])
    assert torch.equal(changed[:2], before["encoder.0.up.weight"][:2])


def test_buffers_are_whole_in_every_part(tmp_path: Path) -> None:
    save_file(norm(), tmp_path / "norm.safetensors")
    rules = [
        {"path": "norm.safetensors", "names": {"*": "read.*"}, "missing": ["*.encoder.*", "judge.head.*"]}
    ]
    local = load_local(workload_file(tmp_path, rules), {"judge": [0], "read": []})
    root = local.graph.tasks["read"].root
    assert root.get_buffer("norm.running_mean").tolist() == [5.0] * 4
    assert root.get_buffer("norm.num_batches_tracked").item() == 7
    assert load_abstract(workload_file(tmp_path, rules)).initial.new[-1] == "judge.head.bias"


@pytest.mark.parametrize(
    ("wanted", "saved", "rounds", "fits"),
    [
        ("float32", "bfloat16", False, True),
        ("float32", "float16", False, True),
        ("float64", "float32", False, True),
        ("bfloat16", "float32", False, False),
        ("bfloat16", "float16", False, False),  # more bits of the mantissa
        ("float16", "bfloat16", False, False),  # a larger range
        ("bfloat16", "float32", True, True),
        ("float32", "int32", True, False),
    ],
)
def test_numbers_are_those_of_the_file_or_rounded_where_that_is_asked_for(
    wanted: str, saved: str, rounds: bool, fits: bool, tmp_path: Path
) -> None:
    kept = {name: (value + 0.3).to(getattr(torch, saved)) for name, value in encoder(250.0).items()}
    save_file(kept, tmp_path / "a.safetensors")
    rules = [{"path": "a.safetensors", "names": {"*": "alone.layers.*"}, "round": rounds}]
    source = workload_file(tmp_path, rules, "build_split", dtype=wanted)
    if not fits:
        expected = rf"of another dtype, 8:\n.* is {wanted}; 0.down.bias in a.safetensors is {saved}"
        with pytest.raises(InputError, match=expected):
            load(source)
        return
    after = state(load(source))
    for name, value in kept.items():
        found = after[f"alone.layers.{name}"]
        assert found.dtype == getattr(torch, wanted)
        assert torch.equal(found, value.to(found.dtype))


def misfit(tmp_path: Path, tensors: Mapping[str, Tensor], **source: object) -> str:
    save_file(dict(tensors), tmp_path / "a.safetensors")
    rules = [{"path": "a.safetensors", "names": {"*": "alone.layers.*"}, **source}]
    path = workload_file(tmp_path, rules, "build_split")
    for read in (load, load_abstract):  # before workers are started, too
        with pytest.raises(InputError) as caught:
            read(path)
    return str(caught.value)


def test_all_that_does_not_fit_is_said_at_once_with_the_closest_names(tmp_path: Path) -> None:
    tensors = encoder()
    tensors["1.up.wight"] = tensors.pop("1.up.weight")
    tensors["0.down.weight"] = tensors["0.down.weight"].t().contiguous()
    tensors["0.up.bias"] = tensors["0.up.bias"].long()
    assert misfit(tmp_path, tensors).splitlines() == [
        f"{tmp_path}/workload.yaml: init_from does not fit the workload (7 tensors have a place):",
        "  in no file, 1 of the workload's 8:",
        "    alone.layers.1.up.weight [8, 4]; closest: '1.up.wight'",
        "  left over, as the workload has nothing of that name, 1:",
        "    '1.up.wight' of a.safetensors [8, 4], mapped to 'alone.layers.1.up.wight'; "
        "closest: 'alone.layers.1.up.weight'",
        "  of another shape, 1:",
        "    alone.layers.0.down.weight has [4, 8]; 0.down.weight in a.safetensors has [8, 4]",
        "  of another dtype, 1:",
        "    alone.layers.0.up.bias is float32; 0.up.bias in a.safetensors is int64",
        "  Map names with `names: {pattern: name}`; let what is new keep its values from build with "
        "`missing: [pattern]`; leave out of a file with `skip: [pattern]`; a shape has to be the "
        "workload's: to begin such a part anew, `skip` the tensor in the file and list the part under "
        "`missing`; round to fewer bits with `round: true`; other dtypes have to be the same.",
    ]


def test_one_parameter_is_given_by_one_tensor(tmp_path: Path) -> None:
    names = {"0.up.weight": "alone.layers.1.up.weight", "*": "alone.layers.*"}
    said = misfit(tmp_path, encoder(), names=names)
    assert (
        "alone.layers.1.up.weight: by '0.up.weight' of a.safetensors and '1.up.weight' of a.safetensors"
        in said
    )
    assert "alone.layers.0.up.weight [8, 4]" in said
    fits = {"names": names, "skip": ["1.up.weight"], "missing": ["*.0.up.weight"]}
    rules = [{"path": "a.safetensors", **fits}]
    after = state(load(workload_file(tmp_path, rules, "build_split")))
    assert torch.equal(after["alone.layers.1.up.weight"], encoder()["0.up.weight"])


def test_what_is_left_out_is_no_more_left_over(tmp_path: Path) -> None:
    save_file(
        {**encoder(), "rope.freq": torch.ones(2), "rope.base": torch.ones(1)}, tmp_path / "a.safetensors"
    )
    for choice in (
        {"skip": ["rope.*"]},
        {"only": [r"^\d.*"]},
        {"only": ["0.*", "1.*", "rope.*"], "skip": ["rope.*"]},
    ):
        rules = [{"path": "a.safetensors", "names": {"*": "alone.layers.*"}, **choice}]
        load(workload_file(tmp_path, rules, "build_split"))
    said = misfit(
        tmp_path,
        {**encoder(), "rope.freq": torch.ones(2)},
        names={"0.*": "alone.layers.0.*", "1.*": "alone.layers.1.*"},
    )
    assert "'rope.freq' of a.safetensors [2], which no rule of `names` matches" in said


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"skip": ["nothing*"]}, "init_from[0].skip[0]: 'nothing*' matches no name in the file"),
        ({"only": ["*", "no"]}, "init_from[0].only[1]: 'no' matches no name in the file"),
        (
            {"missing": ["alone.head"]},
            "init_from[0].missing[0]: 'alone.head' matches no name of the workload",
        ),
        ({"names": {"*": "a.*", "x.*": "b.*"}}, "init_from[0].names: 'x.*' matches no name that is taken"),
        ({"names": {"*.*": "a.*"}}, "'*.*' has 2 of '*', but 'a.*' has 1"),
        ({"names": {"^(a": "b"}}, "not a regular expression"),
        ({"names": {"^(a)": r"b\2"}}, "does not go with"),
        ({"names": {"a": ""}}, "expected the name that takes its place"),
        ({"skip": "rope.*"}, "expected a list of patterns, such as ['rope.*']"),
        ({"name": {}}, "unknown key 'name'; known are path, names, only, skip, missing, round"),
        ({"path": ""}, "init_from[0].path"),
        ({"path": "gone"}, "no such file or folder"),
        ({"path": 3}, "init_from[0].path"),
        ({"round": "maybe"}, "init_from[0].round"),
    ],
)
def test_a_wrong_rule_is_named(source: dict[str, object], said: str, tmp_path: Path) -> None:
    assert said in misfit(tmp_path, encoder(), **source)


@pytest.mark.parametrize("init_from", [3, [3], [["a"]], "", [{}]])
def test_what_is_no_source_is_refused(init_from: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="init_from"):
        load(workload_file(tmp_path, init_from, "build_split"))


def test_a_key_that_is_nearly_right_is_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "workload.yaml"
    path.write_text(f"schema: spindle.workload/1\nmodel: {TOYS}:build\ninit_form: a.safetensors\n")
    with pytest.raises(InputError, match="unknown key 'init_form'; is 'init_from' meant"):
        load(str(path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
@pytest.mark.parametrize("in_folder", [True, False])
def test_a_pickle_is_not_opened(name: str, in_folder: bool, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / name).write_bytes(b"\x80\x04.")
    with pytest.raises(InputError, match=rf"{name} is a pickle.*not opened") as caught:
        load(workload_file(tmp_path, "old" if in_folder else f"old/{name}", "build_split"))
    assert "save_pretrained" in str(caught.value)


def test_folders_and_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    def said(path: str) -> str:
        with pytest.raises(InputError) as caught:
            load(workload_file(tmp_path, [{"path": path, "names": {"*": "alone.layers.*"}}], "build_split"))
        return str(caught.value)

    (tmp_path / "empty").mkdir()
    assert "neither model.safetensors nor model.safetensors.index.json" in said("empty")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "--from" in said("run")
    folder = sharded(tmp_path, extra="model-0.safetensors")
    assert "'extra' is not in model-0.safetensors" in said("shards")
    sharded(tmp_path, extra="../a.safetensors")
    assert "'../a.safetensors' is no file beside the index" in said("shards")
    sharded(tmp_path, extra="model-2.safetensors")
    assert "model-2.safetensors is missing, which has 1 of the tensors" in said("shards")
    sharded(tmp_path, extra="model-2.bin")
    assert "is a pickle" in said("shards")
    sharded(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["0.up.bias"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "'0.up.bias' is not said to be in model-0.safetensors" in said("shards")
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "weight_map: expected a mapping" in said("shards")
    sharded(tmp_path)
    save_file(encoder(), folder / "model.safetensors")
    assert "two models, or one twice" in said("shards")
    (folder / "model.safetensors").unlink()
    whole = (folder / "model-1.safetensors").read_bytes()
    (folder / "model-1.safetensors").write_bytes(whole[:-4])
    assert "model-1.safetensors: cannot be read" in said("shards")
    save_file({}, tmp_path / "none.safetensors")
    assert "no tensors in none.safetensors" in said("none.safetensors")


class Wrapped(nn.Module):
    """As PEFT wraps a layer: the layer itself is one step further down."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_what_peft_has_wrapped_keeps_the_name_that_it_had_before() -> None:
    from spindle_cli.workload.initial.matching import Holders
    from spindle_cli.workload.types import Task, Workload

    module = nn.Module()
    module.query = Wrapped(nn.Linear(2, 2))
    known = Holders.of(Workload("w", [Task("t", module, 1, [])])).canonical
    assert known["t.query.weight"] == known["t.query.base_layer.weight"] == "t.query.base_layer.weight"
