"""How long searches for plans are: a quarter of what they are for users. Cases of tests are small, and what a
search finds of them it finds soon; tests of how long searches are, or how good plans, say so.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spindle_cli.plan.mixed import candidates as on_types
from spindle_cli.plan.pipelines import candidates
from spindle_cli.plan.refine import search
from spindle_cli.plan.strategies import spindle

SHARE = 4
PIPELINES, ON_TYPES = candidates.BASE_PASSES, on_types.BASE_JOBS
EVERYTHING = search.PASSES
DRAFTS = spindle.SHORTEST


# Of each file: of the package it would last to the end of the session, in all that is tested after it.
@pytest.fixture(scope="module", autouse=True)
def short_searches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "BASE_PASSES", PIPELINES // SHARE)
        patch.setattr(on_types, "BASE_JOBS", ON_TYPES // SHARE)
        patch.setattr(spindle, "SHORTEST", DRAFTS // SHARE)
        patch.setattr(search, "PASSES", EVERYTHING // SHARE)
        yield


@pytest.fixture
def whole_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one test: as long as for users."""
    monkeypatch.setattr(candidates, "BASE_PASSES", PIPELINES)
    monkeypatch.setattr(on_types, "BASE_JOBS", ON_TYPES)
    monkeypatch.setattr(spindle, "SHORTEST", DRAFTS)
    monkeypatch.setattr(search, "PASSES", EVERYTHING)
