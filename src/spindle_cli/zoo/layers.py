"""Transformer layers of the zoo, in plain PyTorch. Each layer class is one operator.

Shapes: B samples, S tokens, W width, H heads of W / H. Keys have no bias: softmax ignores it, so its gradient
is only rounding noise, which Adam would blow up to full-sized steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Multi-head attention of `x` over `context` (over itself by default)."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, bias: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads")
        self.num_heads = heads
        self.head_width = width // heads
        self.causal = causal
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """[B, S, W] and [B, T, W] -> [B, S, W]."""
        source = x if context is None else context
        query, key = self.split_heads(self.query(x)), self.split_heads(self.key(source))
        return self.attend(query, key, self.split_heads(self.value(source)))

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, S, W] -> [B, H, S, W / H]."""
        return torch.unflatten(x, -1, (-1, self.head_width)).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, H, S, W / H], twice [B, H, T, W / H] -> [B, S, W]."""
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Two linear maps with a GELU between: [..., W] -> [..., W]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., W] -> [..., W]."""
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class EncoderLayer(nn.Module):
    """Pre-norm transformer layer: self-attention, then an MLP of `hidden` units (4 x width by default)."""

    def __init__(self, width: int, heads: int, *, hidden: int | None = None, causal: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden or 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, W] -> [B, S, W]."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm layer of an encoder-decoder: causal self-attention, attention over the encoder, MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """[B, S, W] and the encoder's [B, T, W] -> [B, S, W]."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.cross_attention(self.cross_norm(x), context)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class RotaryAttention(Attention):
    """Causal self-attention with rotary positions and no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, causal=True, bias=False)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """[B, S, W] -> [B, S, W]; takes no context."""
        assert context is None
        query, key = self.split_heads(self.query(x)), self.split_heads(self.key(x))
        angles = rotary_angles(x.shape[1], self.head_width, x.device)
        value = self.split_heads(self.value(x))
        return self.attend(rotate(query, angles), rotate(key, angles), value)


def rotary_angles(tokens: int, head_width: int, device: torch.device) -> Tensor:
    """Angle of each position and pair of channels, [S, W / H / 2] (Su et al., RoFormer, arXiv 2104.09864)."""
    frequencies = 10000.0 ** (-torch.arange(0, head_width, 2, device=device) / head_width)
    return torch.outer(torch.arange(tokens, device=device), frequencies)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the channel pairs of [B, H, S, W / H] by `angles`: channel i pairs with channel i + half."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class LanguageLayer(nn.Module):
    """Layer of a decoder-only language model: RMS norms, rotary causal attention, gated MLP (`hidden`)."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = RotaryAttention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, W] -> [B, S, W]."""
        x = x + self.attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        out: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return out


class ContrastiveLoss(nn.Module):
    """Symmetric contrastive loss of two views, row i of one belonging to row i of the other.

    With `labels`, every pair of equal labels belongs together (several positives share the target evenly).
    Its samples depend on each other: name it in `Workload.contrastive`.
    """

    def __init__(self, temperature: float = 0.07) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(-torch.tensor(temperature).log())

    def forward(self, a: Tensor, b: Tensor, labels: Tensor | None = None) -> Tensor:
        """Embeddings [B, W] and [B, W], labels [B] -> scalar."""
        a, b = functional.normalize(a, dim=-1), functional.normalize(b, dim=-1)
        logits = self.log_scale.exp() * a @ b.T  # [B, B]
        if labels is None:
            labels = torch.arange(len(a), device=a.device)
        same = (labels[:, None] == labels[None, :]).to(logits.dtype)
        targets = same / same.sum(dim=1, keepdim=True)  # symmetric, as rows of one label have equal sums
        return (functional.cross_entropy(logits, targets) + functional.cross_entropy(logits.T, targets)) / 2


class TokenLoss(nn.Module):
    """Projection to the vocabulary and mean cross-entropy of the next token."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """[B, S, W] and token numbers [B, S] -> scalar."""
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _attention(name: str) -> dict[str, str]:
    maps = {f"{name}.{part}": "colwise" for part in ("query", "key", "value")}
    return {**maps, f"{name}.out": "rowwise"}


_MLP = {"mlp.up": "colwise", "mlp.down": "rowwise"}
# Megatron's way: each pair of colwise and rowwise maps needs one sum per direction. Losses stay whole.
TP_PLANS: dict[type[nn.Module], dict[str, str]] = {
    EncoderLayer: {**_attention("attention"), **_MLP},
    DecoderLayer: {**_attention("attention"), **_attention("cross_attention"), **_MLP},
    LanguageLayer: {**_attention("attention"), "gate": "colwise", "up": "colwise", "down": "rowwise"},
}
