"""What operations of torch write to, by their schemas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spindle_cli.workload.building.memory import written_by

ONE, TWO, THREE = (torch.zeros(2) for _ in range(3))
ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (ATEN.add.Tensor, (ONE, TWO), {}, []),
        (ATEN.add_.Tensor, (ONE, TWO), {}, [ONE]),
        (ATEN.view.default, (ONE, [2]), {}, []),  # has the memory of what it is given, and only reads it
        (ATEN.add.out, (ONE, TWO), {"out": THREE}, [THREE]),
        (ATEN._foreach_mul_.Scalar, ([ONE, TWO], 0.5), {}, [ONE, TWO]),
        (ATEN._foreach_add_.List, ([ONE], [TWO]), {"alpha": 2}, [ONE]),
    ],
)
def test_what_is_written_to_is_what_the_schema_says(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[torch.Tensor]
) -> None:
    assert list(map(id, written_by(func, args, kwargs))) == list(map(id, expected))
