"""That what was exported is what was trained: check.py FOLDER, as run.sh leaves it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from spindle_cli.workload.building.load import load

out = Path(sys.argv[1])
tasks = {task.name: task for task in load(str(out / "toy.yaml")).workload.tasks}
trained = load_file(out / "model.safetensors")
for name, task in tasks.items():
    prefix = f"{name}."
    state = {key.removeprefix(prefix): value for key, value in trained.items() if key.startswith(prefix)}
    task.module.load_state_dict(state)
    task.module.eval()

tokens = torch.stack([tasks["chat"].dataset[index]["input_ids"] for index in range(8)])
base = AutoModelForCausalLM.from_pretrained(out / "base")
with torch.no_grad():
    before = base(tokens).logits
    expected = tasks["chat"].module(tokens).logits
    found = {
        "adapters on the base": PeftModel.from_pretrained(base, out / "adapters").eval()(tokens).logits,
        "merged": AutoModelForCausalLM.from_pretrained(out / "merged").eval()(tokens).logits,
        "topic": AutoModelForSequenceClassification.from_pretrained(out / "topic").eval()(tokens).logits,
    }
    wanted = {"topic": tasks["topic"].module(tokens).logits}
moved = (expected - before).abs().max().item()
print(f"training has moved the logits of chat by up to {moved:.3g}")
failed = moved == 0
for what, logits in found.items():
    off = (logits - wanted.get(what, expected)).abs().max().item()
    print(f"{what}: logits off by at most {off:.3g}")
    failed |= off > 1e-5 * max(1.0, expected.abs().max().item())
sys.exit(failed)
