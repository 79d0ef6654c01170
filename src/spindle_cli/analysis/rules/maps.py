"""Rules of products, convolutions, norms, poolings and attention kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spindle_cli.analysis.rules.tape import Call, Operand, Varying
from spindle_cli.analysis.rules.types import UNUSED, WHOLE, Batch, MixesError, Reduced, State
from spindle_cli.analysis.rules.views import aligned, joined, labelled

Rule = Callable[[Call], list[State]]
NORMALISES = "it normalises over the batch"
_INSIDE = "it works along the batch"


def _product(**letters: str) -> Rule:
    """A product by the letters of its arguments' dimensions; `out` are those of its result."""
    result = letters.pop("out")
    inputs = {name.rstrip("_"): dims for name, dims in letters.items()}

    def rule(call: Call) -> list[State]:
        return [labelled([(call[name], dims) for name, dims in inputs.items()], result, may_sum=True)]

    return rule


def _with_addend(product: Rule) -> Rule:
    """addmm and its like: the product, and something that is broadcast to it."""

    def rule(call: Call) -> list[State]:
        made = product(call)[0]
        if isinstance(made, Reduced):
            raise MixesError("it adds to a sum over the batch")
        return [joined([made, aligned(call["self"], len(call.results[0][0]))])]

    return rule


def _linear(call: Call) -> list[State]:
    operand: Operand = call["input"]
    letters = "abcdefgh"[: operand.ndim - 1] + "i"
    inputs = [(operand, letters), (call["weight"], "oi")]
    if call["bias"] is not None:
        inputs.append((call["bias"], "o"))
    return [labelled(inputs, letters[:-1] + "o")]


def _distance(call: Call) -> list[State]:
    """cdist: of each row of x1 to each of x2, for equal leading dimensions."""
    leading = "abcdef"[: call["x1"].ndim - 2]
    if call["x2"].ndim != call["x1"].ndim:
        raise MixesError(_INSIDE)
    return [labelled([(call["x1"], leading + "pm"), (call["x2"], leading + "rm")], leading + "pr")]


def _bilinear(call: Call) -> list[State]:
    """_trilinear as torch's bilinear calls it: (N, in1), (out, in1, in2) and (N, in2) to (N, out)."""
    given = [call[name] for name in ("expand1", "expand2", "expand3", "sumdim")]
    if given != [[1, 3], [0], [1, 2], [2, 3]]:
        raise MixesError(_INSIDE)
    return [labelled([(call["i1"], "na"), (call["i2"], "oab"), (call["i3"], "nb")], "no")]


def _only_input(call: Call, name: str) -> Batch:
    """State of an input where nothing else may come from the batch."""
    state = call[name].state
    others = [operand for operand in call.operands if operand is not call[name]]
    if not isinstance(state, Batch) or any(operand.state != WHOLE for operand in others):
        raise MixesError("its weights depend on the batch")
    return state


def _convolution(call: Call) -> list[State]:
    state = _only_input(call, "input")
    if state.dim != 0 or call.varies:
        raise MixesError(_INSIDE)
    return [state]


def _layer_norm(call: Call) -> list[State]:
    state = _only_input(call, "input")
    if call.varies or state.dim >= call["input"].ndim - len(call["normalized_shape"]):
        raise MixesError(NORMALISES)
    return [state] * len(call.results)


def _group_norm(call: Call) -> list[State]:
    state = _only_input(call, "input")
    sizes = call["N"].values if isinstance(call["N"], Varying) else ()
    if state.dim != 0 or sizes != tuple(shape[0] for shape in call["input"].shapes):
        raise MixesError(NORMALISES)
    if any(isinstance(call[name], Varying) for name in ("C", "HxW", "group")):
        raise MixesError(NORMALISES)
    return [state] * len(call.results)


def _batch_norm(call: Call) -> list[State]:
    """Over all dimensions but 1, so that samples that lie along dimension 1 (instance norm) are normalised
    each by itself; by fixed statistics where it is not training.
    """
    state = call["input"].state
    training = call["training"] if "training" in call.arguments else call["train"]
    training = training is not False or call["running_mean"] is None
    if isinstance(state, Batch) and state.dim == 1:
        along = [replace(state, dim=0)]
        others = [operand.state for operand in call.operands if operand is not call["input"]]
        if all(operand_state in (WHOLE, *along) for operand_state in others):
            return [state, *along * (len(call.results) - 1)]
    if training or not isinstance(state, Batch) or state.dim == 1:
        raise MixesError(NORMALISES)
    _only_input(call, "input")
    return [state, *[UNUSED] * (len(call.results) - 1)]


def _over_last(count: int, name: str = "self") -> Rule:
    """A pooling or resizing of the last `count` dimensions."""

    def rule(call: Call) -> list[State]:
        state = _only_input(call, name)
        if call.varies or state.dim >= call[name].ndim - count:
            raise MixesError(_INSIDE)
        return [state] * len(call.results)

    return rule


def _over_channels(call: Call) -> list[State]:
    """What takes (N, channels, ...) apart: only N may be the batch."""
    state = _only_input(call, "input" if "input" in call.arguments else "self")
    if call.varies or state.dim != 0:
        raise MixesError(_INSIDE)
    return [state] * len(call.results)


def _grid(call: Call) -> list[State]:
    state = joined([operand.state for operand in call.operands])
    if isinstance(state, Batch) and state.dim == 0 and all(o.state == state for o in call.operands):
        return [state]
    raise MixesError(_INSIDE)


def _attention(call: Call) -> list[State]:
    """The state of attention over (batch, heads, tokens, width): both leading dimensions may be the
    batch's.
    """
    named = [call[name] for name in ("query", "key", "value")]
    state = joined([operand.state for operand in named])
    if not isinstance(state, Batch) or state.dim > 1 or any(o.state != state for o in named):
        raise MixesError("it attends across the batch")
    mask = call["attn_mask"] if call["attn_mask"] is not None else call["attn_bias"]
    if isinstance(mask, Operand):
        joined([state, aligned(mask, 4)])
    return [state, *[UNUSED] * (len(call.results) - 1)]


def _recurrent(call: Call) -> list[State]:
    """mkldnn_rnn_layer: (time, batch, channels) and states of (batch, channels)."""
    state = call["input"].state
    wanted = 0 if call["batch_first"] else 1
    hidden = {"hx_", "cx_"}
    for name, value in call.arguments.items():
        expected = Batch(wanted) if name == "input" else Batch(0) if name in hidden else WHOLE
        if isinstance(value, Operand) and value.state not in (expected, WHOLE):
            raise MixesError(_INSIDE)
    if state != Batch(wanted):
        raise MixesError(_INSIDE)
    return [state, Batch(0), Batch(0), *[UNUSED] * (len(call.results) - 3)]


_MM = _product(self="ij", mat2="jk", out="ik")
_BMM = _product(self="bij", mat2="bjk", out="bik")
RULES: dict[str, Rule] = {
    "mm": _MM,
    "bmm": _BMM,
    "addmm": _with_addend(_product(mat1="ij", mat2="jk", out="ik")),
    "baddbmm": _with_addend(_product(batch1="bij", batch2="bjk", out="bik")),
    "mv": _product(self="ij", vec="j", out="i"),
    "addmv": _with_addend(_product(mat="ij", vec="j", out="i")),
    "dot": _product(self="i", tensor="i", out=""),
    "outer": _product(self="i", vec2="j", out="ij"),
    "linear": _linear,
    "_cdist_forward": _distance,
    "_trilinear": _bilinear,
    "convolution": _convolution,
    "_convolution": _convolution,
    "mkldnn_convolution": _convolution,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _layer_norm,
    "native_group_norm": _group_norm,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "_batch_norm_impl_index"),
        _batch_norm,
    ),
    **dict.fromkeys(
        ("avg_pool1d", "_adaptive_avg_pool1d", "upsample_linear1d", "upsample_nearest1d"), _over_last(1)
    ),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), _over_last(2)),
    **dict.fromkeys(("adaptive_max_pool2d", "upsample_nearest2d", "upsample_bilinear2d"), _over_last(2)),
    **dict.fromkeys(
        ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"), _over_last(2)
    ),
    **dict.fromkeys(("max_pool3d_with_indices", "avg_pool3d", "_adaptive_avg_pool3d"), _over_last(3)),
    **dict.fromkeys(("upsample_nearest3d", "upsample_trilinear3d"), _over_last(3)),
    "pixel_shuffle": _over_last(3),
    "pixel_unshuffle": _over_last(3),
    "im2col": _over_channels,
    "col2im": _over_channels,
    "channel_shuffle": _over_channels,
    "grid_sampler_2d": _grid,
    "grid_sampler_3d": _grid,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        _attention,
    ),
    "mkldnn_rnn_layer": _recurrent,
}
