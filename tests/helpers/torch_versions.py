"""Marks of tests about what not every version of torch can do."""

from __future__ import annotations

import pytest
import torch

from spindle_cli.runtime.memory.gather_memory import EXCHANGES_STORAGES
from spindle_cli.runtime.step.casts import keeps_gradients

exchanges_storages = pytest.mark.skipif(
    not EXCHANGES_STORAGES, reason="this torch cannot exchange what two storages have: before 2.13"
)
widens_gradients = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"),
    reason="this torch adds gradients up in the dtype of their parameters: before 2.10",
)
keeps_casts = pytest.mark.skipif(
    not keeps_gradients(),
    reason="this torch keeps casts that were made without gradients for passes with them",
)
broadcasts_variances = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="this torch takes no variances that samples share: before 2.10"
)
