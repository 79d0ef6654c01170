"""Small random models are trained as in plain PyTorch, or refused; the long run is `make fuzz-models`."""

from __future__ import annotations

import pytest
from model_fuzz.compare import compare
from model_fuzz.losses import COUPLED, MEANS, SUMS
from model_fuzz.models import Recipe, recipe
from model_fuzz.pieces import COUPLING, SEPARATE


def made(
    *blocks: tuple[str, ...],
    before: tuple[str, ...] = (),
    between: tuple[str, ...] = (),
    loss: str = "mean",
    is_operator: bool = False,
) -> Recipe:
    return Recipe(0, 7, before, blocks, between, (), loss, is_operator, (0.5,) * 9)


@pytest.mark.parametrize("number", range(40))
def test_no_random_model_is_trained_as_another(number: int) -> None:
    assert compare(recipe(seed=1, number=number)).wrong is None


@pytest.mark.parametrize("piece", SEPARATE)
def test_a_piece_that_couples_nothing_is_split(piece: str) -> None:
    outcome = compare(
        Recipe(0, 7, (piece,), ((piece,), ("linear",)), (piece,), (), "mean", False, (0.5,) * 9)
    )
    assert (outcome.wrong, outcome.whole, outcome.refused) == (None, (), None)


@pytest.mark.parametrize("piece", COUPLING)
def test_a_piece_that_couples_samples_is_whole_or_refused(piece: str) -> None:
    """Inside an operator, and before all of them."""
    inside = compare(made(("linear", piece)))
    before = compare(made(("linear",), before=(piece,)))
    for outcome in (inside, before):
        assert outcome.wrong is None
        assert outcome.whole or outcome.refused


@pytest.mark.parametrize("loss", [*MEANS, *SUMS, *COUPLED])
@pytest.mark.parametrize("is_operator", [False, True])
def test_a_loss_is_the_plain_one(loss: str, is_operator: bool) -> None:
    outcome = compare(made(("linear",), loss=loss, is_operator=is_operator))
    assert outcome.wrong is None and (outcome.refused is None or is_operator)
    assert outcome.whole or loss not in COUPLED
