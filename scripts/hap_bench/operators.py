"""Models as chains of operators, forward, with what each computes, holds and hands on for a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from spindle_cli.costs.parameters import ID_BYTES
from spindle_cli.zoo import bert_moe
from spindle_cli.zoo.experts import capacity_of
from spindle_cli.zoo.single_task import bert, vgg, vit

FLOAT_BYTES = 4
# What attention and its projections, or a map and its hidden units, are to each other.
QKV, HIDDEN = 3, 4


class Kind(Enum):
    """What can be done with an operator beside cutting the batch."""

    OTHER = auto()  # nothing
    DENSE = auto()  # a linear map: cut by its outputs or inputs
    FEATURES = auto()  # attention of some heads, and what is elementwise: cut by features
    EXPERTS = auto()  # a mixture: cut by experts
    LOOKUP = auto()  # an embedding: its gradient has as many rows as tokens


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        metaop: whose op it is a part of.
        flops: of the forward pass, of a sample.
        param_bytes: of its parameters.
        in_bytes, out_bytes: of a sample's input and output; of a mixture, of the tokens that go to experts.
        outputs, inputs: of a linear map; 0 for others.
        tokens: of a sample.
    """

    metaop: str
    kind: Kind
    flops: float
    param_bytes: float
    in_bytes: float
    out_bytes: float
    outputs: int = 0
    inputs: int = 0
    tokens: int = 1


def _dense(metaop: str, inputs: int, outputs: int, tokens: int = 1) -> Operator:
    return Operator(
        metaop,
        Kind.DENSE,
        flops=2.0 * tokens * inputs * outputs,
        param_bytes=inputs * outputs * FLOAT_BYTES,
        in_bytes=tokens * inputs * FLOAT_BYTES,
        out_bytes=tokens * outputs * FLOAT_BYTES,
        outputs=outputs,
        inputs=inputs,
        tokens=tokens,
    )


def _attention(metaop: str, width: int, tokens: int) -> tuple[Operator, ...]:
    attend = Operator(
        metaop,
        Kind.FEATURES,
        flops=4.0 * tokens**2 * width,
        param_bytes=0,
        in_bytes=QKV * tokens * width * FLOAT_BYTES,
        out_bytes=tokens * width * FLOAT_BYTES,
    )
    return _dense(metaop, width, QKV * width, tokens), attend, _dense(metaop, width, width, tokens)


def _encoder_layer(metaop: str, width: int, tokens: int) -> tuple[Operator, ...]:
    hidden = HIDDEN * width
    mlp = _dense(metaop, width, hidden, tokens), _dense(metaop, hidden, width, tokens)
    return (*_attention(metaop, width, tokens), *mlp)


def _lookup(metaop: str, words: int, width: int, tokens: int) -> Operator:
    """An embedding: reading its rows is priced as adding them once."""
    size = tokens * width
    return Operator(
        metaop,
        Kind.LOOKUP,
        flops=float(size),
        param_bytes=words * width * FLOAT_BYTES,
        in_bytes=tokens * ID_BYTES,
        out_bytes=size * FLOAT_BYTES,
        tokens=tokens,
    )


def _vgg19() -> tuple[Operator, ...]:
    spec, found = vgg.MODELS["paper"], []
    channels, height = vgg.COLOURS, vgg.PICTURE
    for number, stage in enumerate(spec.stages):
        metaop = f"{vgg.TASK}/stages" + (f"-{number + 1}" if number else "")
        for place, width in enumerate(stage):
            after = height // 2 if place == len(stage) - 1 else height
            found.append(
                Operator(
                    metaop,
                    Kind.OTHER,
                    flops=2.0 * 9 * channels * width * height**2,
                    param_bytes=9 * channels * width * FLOAT_BYTES,
                    in_bytes=channels * height**2 * FLOAT_BYTES,
                    out_bytes=width * after**2 * FLOAT_BYTES,
                )
            )
            channels, height = width, after
    found += [
        _dense(f"{vgg.TASK}/dense", channels * spec.pooled**2, spec.hidden),
        _dense(f"{vgg.TASK}/dense-2", spec.hidden, spec.hidden),
        _dense(f"{vgg.TASK}/loss", spec.hidden, vgg.CLASSES),
    ]
    return tuple(found)


def _vit() -> tuple[Operator, ...]:
    spec = vit.MODELS["paper"]
    tokens = (vgg.PICTURE // vit.PATCH) ** 2 + 1
    patches = _dense(f"{vgg.TASK}/patches", vgg.COLOURS * vit.PATCH**2, spec.width, tokens)
    layer = _encoder_layer(f"{vgg.TASK}/layers", spec.width, tokens)
    return (patches, *layer * spec.layers, _dense(f"{vgg.TASK}/loss", spec.width, vgg.CLASSES))


def _bert() -> tuple[Operator, ...]:
    spec, task = bert.MODELS["paper"], bert.TASK
    return (
        _lookup(f"{task}/words", spec.vocabulary, spec.width, spec.tokens),
        *_encoder_layer(f"{task}/layers", spec.width, spec.tokens) * spec.layers,
        _dense(f"{task}/loss", spec.width, spec.vocabulary, spec.tokens),
    )


def _bert_moe() -> tuple[Operator, ...]:
    # Words and loss are parts of the first and the last pair.
    spec, metaop = bert_moe.MODELS["paper"], "fill_in/pairs"
    routed = spec.experts * capacity_of(spec.tokens, spec.experts, spec.factor)
    mixture = Operator(
        metaop,
        Kind.EXPERTS,
        flops=2.0 * 2 * routed * spec.width * spec.hidden,
        param_bytes=2 * spec.experts * spec.width * spec.hidden * FLOAT_BYTES,
        in_bytes=routed * spec.width * FLOAT_BYTES,
        out_bytes=routed * spec.width * FLOAT_BYTES,
    )
    pair = (
        *_encoder_layer(metaop, spec.width, spec.tokens),
        *_attention(metaop, spec.width, spec.tokens),
        mixture,
    )
    return (
        _lookup(metaop, spec.vocabulary, spec.width, spec.tokens),
        *pair * spec.pairs,
        _dense(metaop, spec.width, spec.width, spec.tokens),
        _dense(metaop, spec.width, spec.vocabulary, spec.tokens),
    )


MODELS: Mapping[str, tuple[Operator, ...]] = {
    "vgg19": _vgg19(),
    "vit": _vit(),
    "bert-base": _bert(),
    "bert-moe": _bert_moe(),
}
