"""What torch.export and Dynamo make of whole models of `transformers`, beside the tracing of this project.

    python scripts/try_hf_export.py FAMILY ...

For each family (see hf_families.py) in a batch of four: whether torch.export gives a graph for any number of
samples, and into how many graphs Dynamo breaks the forward. Prints a line for each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging

import torch
from hf_families import FAMILIES
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.data import default_collate

BATCH = 4


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="+", metavar="FAMILY", choices=tuple(FAMILIES))
    logging.disable(logging.CRITICAL)
    for name in parser.parse_args().families:
        family = FAMILIES[name]()
        generator = torch.Generator().manual_seed(0)
        batch = default_collate([family.sample(generator) for _ in range(BATCH)])
        for tried in (_exported, _broken):
            torch._dynamo.reset()
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                said = tried(family.module, batch)
            print(f"{name}: {said}", flush=True)
    return 0


def _exported(module: nn.Module, batch: dict[str, Tensor]) -> str:
    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, fields: dict[str, Tensor]) -> object:
            return self.module(**fields)

    shapes = {"fields": {name: {0: Dim.AUTO} for name in batch}}
    try:
        made = torch.export.export(Given(), (dict(batch),), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # anything that torch says
        return f"torch.export: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    inputs = [node for node in made.graph.nodes if node.op == "placeholder"][-len(batch) :]
    fixed = [node.name for node in inputs if isinstance(node.meta["val"].shape[0], int)]
    return f"torch.export: {len(made.graph.nodes)} nodes; for {BATCH} samples alone: {fixed or 'none'}"


def _broken(module: nn.Module, batch: dict[str, Tensor]) -> str:
    try:
        found = torch._dynamo.explain(module)(**batch)
    except Exception as error:  # anything that torch says
        return f"Dynamo: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    return f"Dynamo: {found.graph_count} graphs, {len(found.out_guards)} guards"


if __name__ == "__main__":
    raise SystemExit(main())
