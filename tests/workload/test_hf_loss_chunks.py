"""Heads of transformers' models as they come: in chunks they give what they give in one go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'spindle-cli[hf]')")

from hf_families import build
from torch import Tensor

from helpers.analysed import analysed
from spindle_cli.analysis.losses.counts import LossCounter
from spindle_cli.operators.heads.chunked import loss_in_chunks
from spindle_cli.training.batches import Batches
from spindle_cli.training.precision import constants_in

# Cut to single tokens; LLaVA's labels and logits are shifted before.
FAMILIES = ("llama", "gpt2", "t5", "bert_masked_lm", "bert_pretraining", "whisper", "llava")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_in_chunks_gives_what_it_gives_in_one_go(family: str) -> None:
    workload = build([family])
    (task,) = analysed(workload).tasks.values()
    task.root.double()
    size, last = task.task.batch_size, task.ops[-1]
    fields = {
        name: value.double() if value.is_floating_point() else value
        for name, value in Batches(task.task, 0).rows(0, 0, size).items()
    }
    values: dict[str, Tensor] = {}
    found = loss_in_chunks(task, last, size, 4 * size)
    assert found.count > size
    with constants_in(torch.float64):
        for op in task.ops[:-1]:
            given = [*(fields[name] for name in op.fields), *(values[name] for name in op.inputs)]
            values.update(zip(op.outputs, task.op_module(op)(*given), strict=True))
        counts = LossCounter(task.root, last.shares).count(fields, 1.0)
        runs: list[dict[str, Any]] = []
        for module in (task.share_module(last), found.module):
            task.root.zero_grad()
            inputs = [
                values[name].detach().requires_grad_(values[name].requires_grad) for name in last.inputs
            ]
            loss = module(*(fields[name] for name in last.fields), *inputs, 1.0, *counts.unbind())
            loss.backward()
            gradients = {name: p.grad for name, p in task.root.named_parameters() if p.grad is not None}
            own = {name: tensor.grad for name, tensor in zip(last.inputs, inputs, strict=True)}
            runs.append(
                {"loss": loss.detach(), **gradients, **{n: g for n, g in own.items() if g is not None}}
            )
    whole, chunked = runs
    assert whole.keys() == chunked.keys()
    for name, expected in whole.items():
        assert (chunked[name] - expected).abs().max() <= 1e-12 * expected.abs().max().clamp(min=1e-2), name
