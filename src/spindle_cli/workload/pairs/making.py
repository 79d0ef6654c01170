"""Rules of operators that make pairs of samples: products of all with all, tensors by the batch's size."""

from __future__ import annotations

from collections.abc import Callable

from spindle_cli.workload.pairs.judged import (
    NO_ROW,
    SIZED,
    Along,
    Judged,
    broadcast,
    growing,
    have_all_samples,
    joined,
    sample_dims,
)
from spindle_cli.workload.rules.states import WHOLE, MixesError, Pairs
from spindle_cli.workload.rules.tape import Call, Operand, Varying

MakingRule = Callable[[Call], Judged | None]  # None: it makes no pairs


def _product(**letters: str) -> MakingRule:
    """A product by the letters of its arguments' dimensions, `out` being the result's; of samples with
    samples where two letters are theirs.
    """
    out = letters.pop("out")
    names = {name.rstrip("_"): dims for name, dims in letters.items()}

    def rule(call: Call) -> Judged | None:
        if sum(operand.state != WHOLE for operand in call.operands) < 2:
            return None
        along: list[Along] = []
        for name, value in call.arguments.items():
            if not isinstance(value, Operand):
                continue
            if name not in names:
                along.append(broadcast(value, len(out)))
                continue
            own = [(dim, names[name][dim]) for dim in sample_dims(value.state)]
            if any(letter not in out for _, letter in own):
                raise MixesError("it sums over the batch")
            along.append(tuple((dim, out.index(letter)) for dim, letter in own))
        state = joined(call, along)
        return Judged((state,), tuple(along)) if isinstance(state, Pairs) else None

    return rule


def _sized(call: Call) -> Judged | None:
    """Entries for all pairs, by the batch's size: full and its like, eye, expanded numbers."""
    shapes = call.results[0]
    dims = growing(shapes)
    if len(dims) != 2:
        return None
    if not have_all_samples(dims, shapes, call.sizes):
        raise MixesError(NO_ROW)
    others = [value for name, value in call.arguments.items() if name not in ("size", "n", "m")]
    if any(isinstance(value, Varying) for value in others):
        raise MixesError(SIZED)
    along = tuple(broadcast(operand, len(shapes[0])) for operand in call.operands)
    return Judged((Pairs.of(*dims),), along)


RULES: dict[str, MakingRule] = {
    "mm": _product(self="ij", mat2="jk", out="ik"),
    "bmm": _product(self="bij", mat2="bjk", out="bik"),
    "addmm": _product(mat1="ij", mat2="jk", out="ik"),
    "baddbmm": _product(batch1="bij", batch2="bjk", out="bik"),
    "outer": _product(self="i", vec2="j", out="ij"),
    **dict.fromkeys(("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "eye", "expand"), _sized),
}
