"""What is sent is kept until it is given up, when it has left, and no longer."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from spindle_cli.runtime.communication.transfers import Batch, Sending


@dataclass
class Work:
    """A message."""

    waited: int = 0

    def wait(self) -> None:
        self.waited += 1


def batch_of(*works: Work) -> Batch:
    batch = Batch()
    batch._works = list(works)  # type: ignore[arg-type]  # what `start` keeps of torch's
    return batch


def sent(sending: Sending, keys: dict[int, Work]) -> weakref.ref[Tensor]:
    """Send a tensor that nobody else keeps; what is left of it."""
    tensor = torch.zeros(1)
    sending.add(batch_of(*keys.values()), [tensor], list(keys))
    return weakref.ref(tensor)


def test_what_is_given_up_is_waited_for_and_goes_and_nothing_else() -> None:
    sending, works = Sending(), [Work() for _ in range(3)]
    first, second, third = (sent(sending, {number: work}) for number, work in enumerate(works))
    sending.give_up((1,))
    assert (first() is None, second() is None, third() is None) == (False, True, False)
    assert [work.waited for work in works] == [0, 1, 0]
    sending.finish()
    assert (first(), third()) == (None, None)
    assert [work.waited for work in works] == [1, 1, 1]


def test_messages_that_started_together_are_given_up_together() -> None:
    """With NCCL one work stands for all of them."""
    sending, works = Sending(), {4: Work(), 7: Work(), 9: Work()}
    together, other = sent(sending, {key: works[key] for key in (4, 7)}), sent(sending, {9: works[9]})
    sending.give_up((4, 7))
    assert together() is None
    assert other() is not None
    assert [work.waited for work in works.values()] == [1, 1, 0]


def test_at_the_end_all_are_waited_for_once() -> None:
    """gloo would wait for ever the second time."""
    sending, work = Sending(), Work()
    one = sent(sending, {0: work})
    sending.finish()
    assert (one(), work.waited) == (None, 1)
    sending.finish()
    assert work.waited == 1
    again = sent(sending, {0: work})  # the next batch has messages with the same keys
    sending.give_up((0,))
    assert (again(), work.waited) == (None, 2)
