"""Small random models are trained as in plain PyTorch, or refused; the long run is `make fuzz-models`."""

from __future__ import annotations

from functools import partial

import model_fuzz.compare
import pytest
from model_fuzz.losses import COUPLED, MEANS, PAIRED, SUMS
from model_fuzz.models import Recipe, recipe
from model_fuzz.pieces import COUPLING, INSIDE, SEPARATE

from helpers.analysed import analysed
from helpers.tiers import every_other

compare = partial(model_fuzz.compare.compare, analysed=analysed)


def made(
    *blocks: tuple[str, ...],
    before: tuple[str, ...] = (),
    between: tuple[str, ...] = (),
    loss: str = "mean",
    is_operator: bool = False,
) -> Recipe:
    return Recipe(0, 7, before, blocks, between, (), loss, is_operator, (0.5,) * 9)


@pytest.mark.parametrize("number", range(3))
def test_no_random_model_is_trained_as_another(number: int) -> None:
    outcome = compare(recipe(seed=1, number=number), with_check=number == 0)
    assert (outcome.wrong, outcome.misjudged) == (None, None)


@pytest.mark.parametrize("first", range(0, len(SEPARATE), 2))
def test_a_piece_that_couples_nothing_is_split(first: int) -> None:
    """Two at a time: in an operator, and the first of them before all operators and between them."""
    pieces = tuple(SEPARATE)[first : first + 2]
    outcome = compare(
        Recipe(0, 7, pieces[:1], (pieces, ("linear",)), pieces[:1], pieces[1:], "mean", False, (0.5,) * 9)
    )
    assert (outcome.wrong, outcome.whole, outcome.refused) == (None, (), None)


@pytest.mark.parametrize("piece", INSIDE)
def test_a_piece_that_couples_nothing_is_split_inside_of_an_operator(piece: str) -> None:
    outcome = compare(made(("linear", piece), (piece,)))
    assert (outcome.wrong, outcome.whole, outcome.refused) == (None, (), None)


@pytest.mark.parametrize("piece", COUPLING)
def test_a_piece_that_couples_samples_is_whole_or_refused(piece: str) -> None:
    """Inside an operator; others before all operators, where a decision is that of the whole batch."""
    is_inside = list(COUPLING).index(piece) % 2 == 1 or piece == "few samples"
    inside = made(("linear", piece)) if is_inside else made(("linear",), before=(piece,))
    outcome = compare(inside)
    assert outcome.wrong is None
    assert outcome.whole or outcome.refused


@pytest.mark.parametrize("loss", every_other([*MEANS, *SUMS, *PAIRED, *COUPLED]))
def test_a_loss_inside_an_operator_is_the_plain_one(loss: str) -> None:
    outcome = compare(made(("linear",), loss=loss, is_operator=True))
    assert outcome.wrong is None and outcome.refused is None
    assert outcome.whole or loss not in COUPLED
