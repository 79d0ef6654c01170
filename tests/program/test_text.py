"""Actions as text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from helpers.plans import two_towers
from helpers.random_plans import plans
from spindle_cli.plan.types import Plan
from spindle_cli.program.link import link
from spindle_cli.program.text import format_action, format_rank, parse_action
from spindle_cli.program.types import StepSettings


@settings(max_examples=30, deadline=None)
@given(plans())
def test_every_action_comes_back_from_its_text(plan: Plan) -> None:
    for actions in link(plan, settings=StepSettings(sharded=True, clips=True)).actions.values():
        for action in actions:
            assert parse_action(format_action(action)) == action


@pytest.mark.parametrize("text", ["", "F", "F x", "SUM 1 ", "SEND #1 2->3", "STEP 1", "G 1"])
def test_what_is_not_an_action_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="expected an action such as"):
        parse_action(text)


def test_a_rank_is_explained_action_by_action() -> None:
    text = format_rank(link(two_towers()[1]), 0)
    assert "pairs/vision[0:3] forward, samples 0:4" in text
    assert "gradient of pairs/text[0:3], for pairs/loss[0:1]" in text
    assert "wait for everything, then the optimizer" in text
    assert "communicators of device 0: 4\n  on 0  everyone     devices 0-3\n" in text


def test_a_rank_that_the_cluster_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="0 to 3"):
        format_rank(link(two_towers()[1]), 4)
