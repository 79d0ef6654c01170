"""An op's work on a number of samples from that on fewer and on more."""

from __future__ import annotations

from spindle_cli.profile.machine.roofline import Kernel
from spindle_cli.profile.op.counting import Work

# Bytes of some tensors, in each direction.
_Both = tuple[tuple[float, ...], tuple[float, ...]]


def between(few: Work, many: Work, few_rows: int, many_rows: int, rows: int) -> Work | None:
    """Work on `rows` samples from that on fewer and on more, linear in the samples kernel by kernel.

    None where the two do not run the same kernels, so that nothing can be said of what lies between.
    """
    if any(
        len(getattr(few, kernels)) != len(getattr(many, kernels))
        for kernels in ("forward", "backward", "again")
    ):
        return None
    if _lengths(few) != _lengths(many):
        return None
    share = (rows - few_rows) / (many_rows - few_rows)

    def mix(a: float, b: float) -> float:
        return a + share * (b - a)

    def mix_kernels(a: tuple[Kernel, ...], b: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        return tuple(
            Kernel(
                mix(x.flops, y.flops),
                mix(x.num_bytes, y.num_bytes),
                mix(x.output_elements, y.output_elements),
            )
            for x, y in zip(a, b, strict=True)
        )

    def mix_both(a: _Both, b: _Both) -> _Both:
        first, second = (
            tuple(mix(x, y) for x, y in zip(*each, strict=True)) for each in zip(a, b, strict=True)
        )
        return first, second

    return Work(
        mix_kernels(few.forward, many.forward),
        mix_kernels(few.backward, many.backward),
        mix(few.activation_bytes, many.activation_bytes),
        tuple(mix(a, b) for a, b in zip(few.summed_bytes, many.summed_bytes, strict=True)),
        mix_both(few.word_sums, many.word_sums),
        few.batch_sums,
        along=mix_both(few.along, many.along),
        again=mix_kernels(few.again, many.again),
    )


def _lengths(work: Work) -> list[int]:
    return [len(sums) for sums in (*work.word_sums, *work.along)]
