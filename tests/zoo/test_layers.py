"""The zoo's layers against torch's own, and against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from spindle_cli.zoo.layers import (
    Attention,
    ContrastiveLoss,
    DecoderLayer,
    EncoderLayer,
    LanguageLayer,
    TokenLoss,
    rotary_angles,
    rotate,
)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_torchs_multihead_attention(causal: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = Attention(8, 2, causal=causal), torch.nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        assert theirs.in_proj_bias is not None
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, torch.zeros(8), ours.value.bias]))
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    x = torch.randn(3, 5, 8)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5) if causal else None
    expected, _ = theirs(x, x, x, attn_mask=mask)
    torch.testing.assert_close(ours(x), expected)


@pytest.mark.parametrize(
    "layer",
    [EncoderLayer(8, 2, causal=True), LanguageLayer(8, 2, 16), DecoderLayer(8, 2)],
    ids=["encoder", "language", "decoder"],
)
def test_causal_layers_never_look_ahead(layer: torch.nn.Module) -> None:
    torch.manual_seed(0)
    x, context = torch.randn(2, 6, 8), torch.randn(2, 3, 8)
    changed = x.clone()
    changed[:, 4:] += 1
    arguments = (context,) if isinstance(layer, DecoderLayer) else ()
    before, after = layer(x, *arguments), layer(changed, *arguments)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_rotation_keeps_lengths_and_makes_products_depend_on_distance_alone() -> None:
    angles = rotary_angles(8, 4, torch.device("cpu"))
    query, key = (rotate(torch.randn(4).expand(1, 1, 8, 4), angles)[0, 0] for _ in range(2))
    torch.testing.assert_close(query.norm(dim=1), query.norm(dim=1)[:1].expand(8))
    products = query @ key.T
    torch.testing.assert_close(products.diagonal(2), products.diagonal(2)[:1].expand(6))


def test_contrastive_loss_of_two_samples_by_hand() -> None:
    loss = ContrastiveLoss(temperature=0.5)
    same = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    # logits: 2 on the diagonal, 0 beside it
    expected = math.log(math.exp(2) + 1) - 2
    assert loss(same, same).item() == pytest.approx(expected, rel=1e-5)


def test_contrastive_loss_with_labels_shares_the_target_between_positives() -> None:
    loss = ContrastiveLoss(temperature=1.0)
    a = torch.eye(3)
    labels = torch.tensor([5, 5, 7])
    rows = functional.log_softmax(torch.eye(3), dim=1)
    expected = -((rows[0, 0] + rows[0, 1]) / 2 + (rows[1, 0] + rows[1, 1]) / 2 + rows[2, 2]) / 3
    torch.testing.assert_close(loss(a, a, labels), expected)


def test_token_loss_of_an_untold_head_is_the_logarithm_of_the_vocabulary() -> None:
    loss = TokenLoss(4, 10)
    torch.nn.init.zeros_(loss.head.weight)
    assert loss(torch.randn(2, 3, 4), torch.randint(10, (2, 3))).item() == pytest.approx(math.log(10))


def test_a_width_that_the_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="width 10 is not a multiple of 4 heads"):
        EncoderLayer(10, 4)
