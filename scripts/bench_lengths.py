"""What a length costs that comes for the first time: the processor time of its trace, of a GPT-2.

    python scripts/bench_lengths.py [--layers 12] [--rounds 3]

Needs `transformers`. Told are medians; `again` is a length that was traced before, by which new ones are
compared with what a trace takes at least.
"""

from __future__ import annotations

import argparse
import logging
import time
from statistics import median

import torch
from torch.nn.utils.rnn import pad_sequence

from spindle_cli.analysis.analyse import analyse_for_others
from spindle_cli.analysis.at_lengths import LengthTracer
from spindle_cli.workload.settings.types import FieldLengths, TaskLengths
from spindle_cli.workload.types import Task, Workload

FIELDS = ("input_ids", "attention_mask", "labels")
SHORTEST, LONGEST = 10, 64


def build(layers: int) -> Workload:
    """A language model over padded batches; it is traced and never run, so that its width does not matter."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(
        n_layer=layers, n_embd=64, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    items = [
        {name: torch.ones(length, dtype=torch.long) for name in FIELDS} for length in (SHORTEST, LONGEST)
    ]

    def padded(some: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: pad_sequence([item[name] for item in some], batch_first=True) for name in FIELDS}

    task = Task("text", GPT2LMHeadModel(config), 2, items, collate=padded)
    return Workload("text", [task], operators=(GPT2Block,))


def main() -> None:
    """Trace new lengths and old ones in turn."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    field = FieldLengths(planned=(LONGEST,), shortest=(SHORTEST,), longest=(LONGEST,))
    lengths = {"text": TaskLengths(batches=2, fields=dict.fromkeys(FIELDS, field))}
    began = time.process_time()
    graph, memo = analyse_for_others(build(asked.layers), lengths=lengths)
    planned_s = time.process_time() - began
    tracer = LengthTracer(build(asked.layers), graph, memo)

    def traced_s(length: int) -> float:
        began = time.process_time()
        tracer.at("text", dict.fromkeys(FIELDS, (length,))).forget()
        return time.process_time() - began

    traced_s(SHORTEST)  # what is found of no length in particular
    pairs = [(traced_s(SHORTEST + 1 + number), traced_s(SHORTEST)) for number in range(asked.rounds)]
    new_s, again_s = (median(each) for each in zip(*pairs, strict=True))
    print(f"GPT-2 with {asked.layers} layers, processor time: the planned length {planned_s:.2f} s")
    print(f"a new length {new_s:.2f} s, one that was traced before {again_s:.2f} s")


if __name__ == "__main__":
    main()
