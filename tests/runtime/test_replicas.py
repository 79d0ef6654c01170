"""Replicas that each rank steps for itself stay the same: what would let them drift is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spindle_cli.errors import InputError
from spindle_cli.runtime.part import replicas
from spindle_cli.runtime.part.replicas import require_like_devices

H100, H20 = "NVIDIA H100 80GB HBM3", "NVIDIA H20"


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of all ranks; this one is the last."""
    found: list[str] = []

    def gather(names: list[Any], own: str, **_: object) -> None:
        assert own == found[-1]
        names[:] = found

    monkeypatch.setattr(replicas.dist, "get_world_size", lambda: len(found))
    monkeypatch.setattr(replicas.dist, "all_gather_object", gather)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: found[-1])
    return found


def test_a_gradient_that_different_cards_multiply_for_themselves_is_refused(cards: list[str]) -> None:
    cards += [H100, H20, H100, H20]
    device = torch.device("cuda", 0)
    require_like_devices({"a": (0, 2), "b": (1, 3)}, device)
    message = f"'b' is gathered.*: rank 1 on '{H20}', rank 2 on '{H100}'"
    with pytest.raises(InputError, match=message) as caught:
        require_like_devices({"a": (0, 2), "b": (1, 2, 3)}, device)
    assert "--sums dense" in str(caught.value.hint)


def test_processes_on_cpus_are_alike(cards: list[str]) -> None:
    cards += ["cpu", "cpu"]
    require_like_devices({"a": (0, 1)}, torch.device("cpu"))
