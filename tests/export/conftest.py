"""What tests of exports have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.analysed_once import in_the_abstract
from spindle_cli.analysis import localise


@pytest.fixture(scope="module", autouse=True)
def analysed_once() -> Iterator[None]:
    """Each export analyses its run's workload, which is that of other exports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(localise, "in_the_abstract", in_the_abstract)
        yield
