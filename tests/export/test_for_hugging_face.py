"""What `from_pretrained` loads of an export, and PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from saved_runs import save_run
from torch import Tensor

from spindle_cli.errors import UsageError
from spindle_cli.export.run import export_run
from spindle_cli.export.types import ExportOptions
from spindle_cli.workload.building.load import load

transformers: Any = pytest.importorskip("transformers")

TOYS = Path(__file__).parent / "export_toys.py"
TOKENS = torch.arange(12).view(2, 6)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A world of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def moved(name: str, value: Tensor) -> Tensor:
    """Every tensor by a draw of its own."""
    if not value.is_floating_point() or "inv_freq" in name:
        return value.clone()
    drawn = torch.Generator().manual_seed(sum(map(ord, name)))
    return value + 0.3 * torch.randn(value.shape, generator=drawn)


def trained_module(run: Path, tmp_path: Path) -> Any:
    """The task's module with what was trained, by way of one plain file."""
    export_run(run, tmp_path / "all.safetensors", ExportOptions(task="chat"))
    module = load(str(run.parent / "workload.yaml")).workload.tasks[0].module
    module.load_state_dict(load_file(tmp_path / "all.safetensors"))
    return module.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(input_ids=TOKENS).logits
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_from_pretrained_loads_the_shards_of_a_tasks_model(tied: bool, tmp_path: Path) -> None:
    run = save_run(tmp_path, f"{TOYS}:build", moved, args={"tied": tied})
    export_run(run, tmp_path / "out", ExportOptions(task="chat", module="llm", shard_bytes=1000))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert ("lm_head.weight" in index["weight_map"]) is not tied
    assert len(set(index["weight_map"].values())) > 3
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    found, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"]
    trained = trained_module(run, tmp_path)
    assert torch.equal(logits(found), logits(trained.llm))
    fresh = load(str(tmp_path / "workload.yaml")).workload.tasks[0].module
    assert not torch.equal(logits(found), logits(fresh.llm))
    assert torch.equal(trained.spare, fresh.spare)  # used by no operator: as the build made it


@pytest.mark.parametrize(
    "args",
    [
        {},
        pytest.param({"kept": True}, marks=pytest.mark.long),
        pytest.param({"use_rslora": True}, marks=pytest.mark.long),
        {"use_dora": True},
    ],
)
def test_adapters_and_merged_weights_are_those_of_peft(args: dict[str, object], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    run = save_run(tmp_path, f"{TOYS}:build_lora", moved, args=args)
    trained = trained_module(run, tmp_path)
    expected = logits(trained)
    export_run(run, tmp_path / "adapters", ExportOptions(task="chat", peft="adapters"))
    export_run(run, tmp_path / "merged", ExportOptions(task="chat", peft="merged", shard_bytes=2000))
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    trained.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapters", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)

    # The base as it was: in this checkpoint it has been moved, too.
    module = load(str(tmp_path / "workload.yaml")).workload.tasks[0].module
    base = module.unload()
    state = {
        key.removeprefix("base_model.model.")
        .replace("base_layer.", "")
        .replace("original_module.", ""): value.clone()
        for key, value in trained.state_dict().items()
        if "lora_" not in key and "modules_to_save" not in key
    }
    base.load_state_dict(state)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapters")), expected)

    found, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"]
    whole = trained.merge_and_unload().state_dict()
    assert found.state_dict().keys() == whole.keys()
    assert all(torch.equal(value, whole[key]) for key, value in found.state_dict().items())
    assert (logits(found) - expected).abs().max() < 1e-5
    assert not torch.equal(
        state["model.layers.0.self_attn.q_proj.weight"], whole["model.layers.0.self_attn.q_proj.weight"]
    )


def test_what_init_from_took_goes_back_under_its_names(tmp_path: Path) -> None:
    base = load(f"{TOYS}:build").workload.tasks[0].module.llm
    base.save_pretrained(tmp_path / "base", max_shard_size="1KB")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    config = tmp_path / "base" / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    old = {f"old.{key}": value.clone() for key, value in base.state_dict().items() if key != "lm_head.weight"}
    save_file(old, tmp_path / "old.safetensors")
    for path, names in (("base", {"*": "chat.llm.*"}), ("old.safetensors", {"old.*": "chat.llm.*"})):
        folder = tmp_path / f"by-{path}"
        folder.mkdir()
        rules = [{"path": f"../{path}", "names": names, "missing": ["chat.spare"]}]
        run = save_run(folder, f"{TOYS}:build", moved, init_from=rules)
        export_run(run, folder / "out", ExportOptions(like=f"../{path}"))
        found = load_file(folder / "out" / "model.safetensors")
        trained = trained_module(run, folder).llm.state_dict()
        prefix = "old." if path != "base" else ""
        assert {key.removeprefix(prefix) for key in found} == trained.keys() - {"lm_head.weight"}
        assert all(torch.equal(value, trained[key.removeprefix(prefix)]) for key, value in found.items())
    assert sorted(each.name for each in (tmp_path / "by-base" / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    # Weights that were trained in float32 are not rounded by whoever reads the configuration.
    assert json.loads((tmp_path / "by-base" / "out" / "config.json").read_text())["dtype"] == "float32"
    assert [each.name for each in (tmp_path / "by-old.safetensors" / "out").iterdir()] == [
        "model.safetensors"
    ]
    with pytest.raises(UsageError, match=r"no path of the workload's init_from; they are \.\./base"):
        export_run(tmp_path / "by-base" / "run", tmp_path / "out", ExportOptions(like="base"))


def test_adapters_are_merged_into_what_goes_back(tmp_path: Path) -> None:
    base = load(f"{TOYS}:build", relative_to=None).workload.tasks[0].module.llm
    untied = {key: value.clone() for key, value in base.state_dict().items()}
    save_file(untied, tmp_path / "base.safetensors")
    rules = [{"path": "base.safetensors", "names": {"*": "chat.base_model.model.*"}, "missing": ["*.lora_*"]}]
    run = save_run(tmp_path, f"{TOYS}:build_lora", moved, init_from=rules)
    export_run(run, tmp_path / "out", ExportOptions(like="base.safetensors", peft="merged"))
    expected = trained_module(run, tmp_path).merge_and_unload().state_dict()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == untied.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
