"""What the tests on a GPU share."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.gpu import cluster_file


@pytest.fixture
def gpu_cluster(tmp_path: Path) -> Path:
    """A cluster file of this machine's first GPU."""
    return cluster_file(tmp_path, 1)
