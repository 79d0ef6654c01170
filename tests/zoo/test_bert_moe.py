"""The zoo's mixture of experts: which tokens go where, by hand and by loops; and the BERT made of it."""

from __future__ import annotations

from math import e
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from spindle_cli.errors import WorkloadError
from spindle_cli.workload.building.load import load_abstract
from spindle_cli.zoo import bert_moe
from spindle_cli.zoo.experts import MixtureOfExperts, Top2Gate, capacity_of

CONFIGS = Path(__file__).parents[2] / "configs"
FIRST, SECOND, NOT = 2.0, 1.0, 0.0
# Of a token's two choices, whose logits differ by 1, the weight of the first.
FIRST_WEIGHT = e / (e + 1)


def gate_of_tokens(experts: int, capacity: int) -> Top2Gate:
    """A gate that takes its logits as they are."""
    gate = Top2Gate(experts, experts, capacity)
    with torch.no_grad():
        gate.logits.weight.copy_(torch.eye(experts))
    return gate


def places(takes: torch.Tensor) -> list[tuple[int, ...]]:
    """(sample, token, expert, place) of all that is taken."""
    return [tuple(place) for place in takes.nonzero().tolist()]


def test_tokens_take_places_in_order_and_the_last_is_dropped() -> None:
    """Two places: three tokens want expert 0 first, so that the third has its second choice alone."""
    x = torch.tensor([[[FIRST, SECOND, NOT], [FIRST, SECOND, NOT], [FIRST, NOT, SECOND]]])
    takes, weights, balance = gate_of_tokens(3, 2)(x)
    assert places(takes) == [(0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 1), (0, 2, 2, 0)]
    found = [float(weights.detach()[place]) for place in places(takes)]
    first, second = FIRST_WEIGHT, 1 - FIRST_WEIGHT
    assert found == pytest.approx([first, second, first, second, second])
    assert weights.count_nonzero() == len(found)
    # Expert 0 is everybody's first: 3 experts x 1 x its chance, e^2 / (e^2 + e + 1), which all have alike.
    assert float(balance.detach()) == pytest.approx(3 * e**2 / (e**2 + e + 1))


def test_second_choices_stand_behind_all_first_ones() -> None:
    x = torch.tensor([[[FIRST, SECOND], [SECOND, FIRST]]])
    takes, _, balance = gate_of_tokens(2, 2)(x)
    assert places(takes) == [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)]
    assert float(balance.detach()) == pytest.approx(1.0)  # evenly spread


def test_a_sample_is_routed_as_if_it_were_alone() -> None:
    x = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    gate = Top2Gate(4, 4, 2)
    together, alone = gate(x), [gate(sample.unsqueeze(0)) for sample in x]
    for index, whole in enumerate(together):
        assert torch.equal(whole, torch.cat([each[index] for each in alone]))


def test_the_mixture_is_what_loops_over_tokens_give() -> None:
    torch.manual_seed(0)
    tokens, capacity = 10, 3
    mixture = MixtureOfExperts(6, 8, 4, capacity).double()
    torch.nn.init.normal_(mixture.experts.up_bias)
    torch.nn.init.normal_(mixture.experts.down_bias)
    x = torch.randn(2, tokens, 6, dtype=torch.float64)
    found, _ = mixture(x)
    experts, expected = mixture.experts, torch.zeros_like(x)
    for sample, texts in enumerate(x):
        chances = mixture.gate.logits(texts).softmax(-1)
        best = chances.topk(2, dim=-1)
        held = [0] * 4
        for choice in range(2):
            for token in range(tokens):
                expert = int(best.indices[token, choice])
                held[expert] += 1
                if held[expert] > capacity:
                    continue
                inner = functional.gelu(texts[token] @ experts.up[expert] + experts.up_bias[expert])
                out = inner @ experts.down[expert] + experts.down_bias[expert]
                expected[sample, token] += best.values[token, choice] / best.values[token].sum() * out
    assert any(count > capacity for count in held)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_capacity_is_rounded_up() -> None:
    assert capacity_of(128, 16, 1.25) == 20
    assert capacity_of(16, 4, 1.25) == 10
    assert capacity_of(5, 4, 1.0) == 3


def test_it_is_a_bert_base_with_16_experts_in_every_second_layer() -> None:
    model = load_abstract(str(CONFIGS / "workloads" / "bert-moe.yaml")).workload.tasks[0].module
    experts = sum(p.numel() for pair in model.pairs for p in pair.sparse.mixture.experts.parameters())
    others = sum(p.numel() for p in model.parameters()) - experts
    # Of 16 experts: two maps of 768 x 3,072, and their biases.
    assert experts == 6 * 16 * (2 * 768 * 3072 + 768 + 3072)
    # BERT-Base has 110 million with six MLPs more, and the same words for its input and its head.
    assert others / 1e6 == pytest.approx(110 - 6 * 4.72 + 23.4, abs=1.0)


def test_masked_words_are_those_to_be_found() -> None:
    texts = bert_moe.MaskedTexts(1000, 50)
    item = texts[3]
    masked = item["text"] == 0
    assert torch.equal(masked, item["labels"] != -100)
    assert int(item["labels"][masked].min()) > 0
    assert float(masked.float().mean()) == pytest.approx(0.15, abs=0.03)
    assert torch.equal(item["text"], texts[3]["text"])


def test_a_size_that_there_is_not_is_refused() -> None:
    with pytest.raises(WorkloadError, match="bert_moe: size: found 'base', expected one of paper, laptop"):
        bert_moe.build("base")  # type: ignore[arg-type]
