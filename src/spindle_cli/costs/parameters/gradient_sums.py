"""Three ways to give every holder of a matrix the sum of its gradients, and how long each takes.

Of p holders, a matrix of M x N elements of w bytes and T tokens of the whole batch over all holders:

* dense: the gradient goes around twice, 2 (p - 1) / p x M N w bytes from each device.
* rows (of an embedding of M words, N wide): a token's gradient is one row of it. The rows and their ids go
  around once, (p - 1) / p x T (N w + i) bytes with ids of i bytes.
* factors (of a linear map; "sufficient factors", Xie et al. 2016, arXiv 1409.5705): the gradient is a product
  of two factors with a row for each token, its output's gradient (M wide) and its input (N wide). Both go
  around once, (p - 1) / p x T (M + N) w bytes, and every device multiplies all of them instead of its own:
  (p - 1) / p x 2 T M N more operations.

Where only bytes count, and ids are as wide as elements, rows pay below T = 2 M N / (N + 1), factors below
T = 2 M N / (M + N); at either limit both ways move the same. A message's latency is paid 2 (p - 1) times by
the first and p - 1 times by the others, so latency alone never speaks for a dense sum.

Shares of unequal size go around padded to the largest: T is then p times the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

# Ids are sent as int32: no embedding has 2^31 rows.
ID_BYTES = 4


class Summing(StrEnum):
    """How the gradients of a parameter are summed over the devices that hold it."""

    DENSE = "dense"
    ROWS = "rows"
    FACTORS = "factors"


# Seconds of a collective by the bytes that are whole in the end, and by how often they go around: 2 for a sum
# that all get, 1 for a gather. `costs.links.spread_collective_s` of a cluster, or `ring`.
Collective = Callable[[float, int], float]


@dataclass(frozen=True)
class MatrixGradient:
    """The gradient of a matrix.

    Attributes:
        outputs: rows of the matrix, M: words of an embedding, outputs of a linear map.
        inputs: columns, N: width of an embedding, inputs of a linear map.
        tokens: T, what the uses of the matrix in one step look up or multiply, over all holders: p times the
            largest share, where shares are unequal.
        gradient_width: bytes of an element of the gradient that a dense sum moves.
        factor_width: bytes of an element of the rows or factors.
    """

    outputs: int
    inputs: int
    tokens: int
    gradient_width: int = 4
    factor_width: int = 4

    @property
    def dense_bytes(self) -> int:
        """The bytes of the gradient itself, which a sum takes around twice."""
        return self.outputs * self.inputs * self.gradient_width

    @property
    def rows_bytes(self) -> int:
        """The bytes of all rows and their ids, which a gather takes around once."""
        return self.tokens * (self.inputs * self.factor_width + ID_BYTES)

    @property
    def factors_bytes(self) -> int:
        """The bytes of both factors of all tokens, which a gather takes around once."""
        return self.tokens * (self.outputs + self.inputs) * self.factor_width

    def extra_flops(self, num_devices: int) -> float:
        """Operations that each device does more where it multiplies all factors, not its own share's."""
        return 2.0 * self.tokens * self.outputs * self.inputs * (num_devices - 1) / num_devices


def ring(num_devices: int, latency_s: float, bandwidth_bytes_per_s: float) -> Collective:
    """Collectives over one ring of equal links."""

    def collective_s(num_bytes: float, rounds: int) -> float:
        step_s = latency_s + num_bytes / num_devices / bandwidth_bytes_per_s
        return rounds * (num_devices - 1) * step_s

    return collective_s


def dense_s(gradient: MatrixGradient, collective_s: Collective) -> float:
    """Seconds of the sum of the gradient itself."""
    return collective_s(gradient.dense_bytes, 2)


def rows_s(gradient: MatrixGradient, collective_s: Collective) -> float:
    """Seconds of the gather of an embedding's rows."""
    return collective_s(gradient.rows_bytes, 1)


def factors_s(
    gradient: MatrixGradient, collective_s: Collective, num_devices: int, flops_per_s: float
) -> float:
    """Seconds of the gather of a linear map's factors, and of what multiplying them takes longer on every
    device; `flops_per_s` of the slowest of them.
    """
    return collective_s(gradient.factors_bytes, 1) + gradient.extra_flops(num_devices) / flops_per_s


def seconds_by_way(
    gradient: MatrixGradient,
    ways: Collection[Summing],
    collective_s: Collective,
    num_devices: int,
    flops_per_s: float | None,
) -> dict[Summing, float]:
    """Seconds of each of some ways, dense first; of one device nothing takes time.

    Args:
        ways: that are right for the matrix.
        flops_per_s: that a product reaches on the slowest device; None: not known, and factors are left out.
    """
    if num_devices < 2:
        return {Summing.DENSE: 0.0}
    found = {Summing.DENSE: dense_s(gradient, collective_s)}
    if Summing.ROWS in ways:
        found[Summing.ROWS] = rows_s(gradient, collective_s)
    if Summing.FACTORS in ways and flops_per_s is not None:
        found[Summing.FACTORS] = factors_s(gradient, collective_s, num_devices, flops_per_s)
    return found


def fastest(seconds: Mapping[Summing, float]) -> Summing:
    """The way that takes the least time; of equals the one that comes first."""
    return min(seconds, key=seconds.__getitem__)


def rows_limit(words: int, width: int) -> float:
    """Tokens of the whole batch below which rows move less than a dense sum: elements and ids of 4 bytes."""
    return 2 * words * width / (width + 1)


def factors_limit(outputs: int, inputs: int) -> float:
    """Tokens of the whole batch below which factors move less than a dense sum: all of one width."""
    return 2 * outputs * inputs / (outputs + inputs)
