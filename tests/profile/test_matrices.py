"""Which matrices' gradients may be gathered, and for how many tokens: found by running ops without data."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers import rows_toy
from helpers.analysed import analysed
from spindle_cli.profile.checking.matrices import Matrices
from spindle_cli.workload.file import TrainSettings
from spindle_cli.workload.types import Workload

TRAIN = TrainSettings(optimizer="SGD", lr=0.1)
WORDS = "large.embed.words.weight"


Uses = dict[tuple[str, int], tuple[str, int, int]]


def found(train: TrainSettings = TRAIN, workload: Workload | None = None) -> dict[str, Uses]:
    """By matrix, of each op that uses it: its way, its tokens and those that every pass has."""
    matrices = Matrices.find(analysed(workload or rows_toy.build()), train)
    by_name: dict[str, Uses] = {}
    for op, own in matrices.by_op.items():
        for _, each in own:
            by_name.setdefault(each.parameter, {})[op] = each.way, each.tokens, each.fixed_tokens
    return by_name


def test_an_embedding_by_rows_and_dense_layers_by_factors_for_the_tokens_of_the_whole_batch() -> None:
    """5 words for each of 12 and 4 samples; one token a sample of the dense layers, two where one is used
    twice. The positions (5 x 8, 5 tokens in each pass whatever its share), the narrow layer and that of the
    loss move no less gathered.
    """
    large, small = ("large", 0), ("small", 0)
    assert found() == {
        WORDS: {large: ("rows", 60, 0), small: ("rows", 20, 0)},
        "large.wide.up.weight": {("large", 1): ("factors", 12, 0), ("small", 1): ("factors", 4, 0)},
        "large.wide.across.weight": {("large", 1): ("factors", 24, 0), ("small", 1): ("factors", 8, 0)},
    }


def test_what_is_used_in_two_ways_or_not_trained_is_summed_as_it_is() -> None:
    assert WORDS not in found(workload=rows_toy.build(tied=True))
    assert WORDS not in found(workload=rows_toy.build(frozen=True))


class Pulled(rows_toy.Embed):
    """Looks up words, and pulls all of them together."""

    def forward(self, words: Tensor) -> Tensor:
        looked_up: Tensor = super().forward(words)
        return looked_up + 0.01 * self.words.weight.square().mean()


def test_what_gets_a_gradient_beside_its_lookups_is_summed_as_it_is() -> None:
    assert WORDS not in found(workload=rows_toy.build(embed_as=Pulled))


def test_what_a_hook_is_to_see_the_gradient_of_is_summed_as_it_is() -> None:
    workload = rows_toy.build()
    words = workload.tasks[0].module.get_parameter("embed.words.weight")
    words.register_hook(lambda gradient: gradient.clamp(-1, 1))
    assert WORDS not in found(workload=workload)


class Again(rows_toy.Wide):
    """Runs forward once more in its backward pass, by its own code."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        run_again: Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return run_again


class AgainReentrant(Again):
    reentrant = True


@pytest.mark.parametrize("wide_as", [Again, AgainReentrant])
def test_layers_that_recompute_themselves_are_summed_as_they_are(wide_as: type[rows_toy.Wide]) -> None:
    """The second pass runs where nothing takes its factors."""
    assert set(found(workload=rows_toy.build(wide_as=wide_as))) == {WORDS}


def test_batches_of_a_step_count_and_compiled_layers_have_none() -> None:
    """80 words of 36 bytes move less than twice 12,800 bytes, in 8 batches 23,040 do, in 9 no more."""
    eight, nine = (TrainSettings(optimizer="SGD", lr=0.1, accumulate=count) for count in (8, 9))
    assert WORDS in found(eight)
    assert WORDS not in found(nine)
    assert found(TrainSettings(optimizer="SGD", lr=0.1, compile="aot_eager")) == {}


def test_what_every_pass_looks_up_is_told_from_what_its_samples_do() -> None:
    """Positions of a table of 500, of which each pass looks up 5 whatever its share."""
    matrices = Matrices.find(analysed(rows_toy.build(positions=500)), TRAIN)
    tokens = {
        (each.tokens, each.fixed_tokens)
        for own in matrices.by_op.values()
        for _, each in own
        if each.parameter == "large.embed.positions.weight"
    }
    assert tokens == {(0, 5)}
