"""A value without a batch dimension that every share of its producer has: who takes which copy, and where its
gradient goes.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spindle_cli.account.activations import Layout, route
from spindle_cli.runtime.communication.rows import Samples, gradient_of_copy
from spindle_cli.runtime.communication.transfers import Arrival, Batch
from spindle_cli.workload.graph import ValueSpec

BATCH = 12
SPEC = ValueSpec("bias", (), torch.float64, batch_dim=None, rows_per_sample=1, requires_grad=True)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp, tp = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.sampled_from([1, 2]))
    first = draw(st.integers(0, 5))
    return Layout(tuple(range(first, first + dp * tp)), dp, tp, BATCH)


def delivered(
    source: Layout, destination: Layout, held: dict[int, float], *, is_gradient: bool
) -> dict[int, float]:
    """By device of the destination, what it has of a number that each device of the source holds."""
    found: dict[int, float] = {}
    for device in destination.devices:
        chunks = tuple(chunk for chunk in route(source, destination) if chunk.destination == device)

        def given_to(source_device: int, samples: Samples) -> Tensor:
            value = torch.tensor(held[source_device], dtype=torch.float64)
            return gradient_of_copy(value, source.rows_of(source_device), samples) if is_gradient else value

        arrival = Arrival(SPEC, destination.rows_of(device), chunks, device, torch.device("cpu"))
        for chunk in chunks:
            if chunk.source != device:
                samples = (chunk.first, chunk.last)
                arrival.make_room(samples, Batch()).copy_(given_to(chunk.source, samples))
        own = lambda _, samples, device=device: given_to(device, samples)  # noqa: E731
        found[device] = float(arrival.complete(own, is_gradient=is_gradient))
    return found


@given(layouts(), layouts())
def test_a_share_takes_the_copy_of_the_share_that_has_its_first_sample(one: Layout, other: Layout) -> None:
    held = {device: float(one.share_of[device]) for device in one.devices}
    for device, copy in delivered(one, other, held, is_gradient=False).items():
        first = other.rows_of(device)[0]
        assert copy == first * one.dp // BATCH


@given(layouts(), layouts())
def test_each_consumers_gradient_goes_to_one_copy(producer: Layout, consumer: Layout) -> None:
    gradients = {device: 10.0 ** consumer.share_of[device] for device in consumer.devices}
    found = delivered(consumer, producer, gradients, is_gradient=True)
    for share in range(producer.dp):
        assert len({found[device] for device in producer.holders(share)}) == 1
    total = sum(found[producer.holders(share)[0]] for share in range(producer.dp))
    assert total == sum(10.0**share for share in range(consumer.dp))


def test_two_shares_give_their_gradients_to_the_four_of_the_producer_that_they_took_from() -> None:
    four, two = Layout((0, 1, 2, 3), 4, 1, BATCH), Layout((4, 5), 2, 1, BATCH)
    assert delivered(two, four, {4: 3.0, 5: 5.0}, is_gradient=True) == {0: 3.0, 1: 0.0, 2: 5.0, 3: 0.0}


def test_four_shares_give_their_gradients_to_the_two_of_the_producer_by_pairs() -> None:
    two, four = Layout((0, 1), 2, 1, BATCH), Layout((0, 1, 2, 3), 4, 1, BATCH)
    gradients = {0: 1.0, 1: 2.0, 2: 4.0, 3: 8.0}
    assert delivered(four, two, gradients, is_gradient=True) == {0: 3.0, 1: 12.0}
